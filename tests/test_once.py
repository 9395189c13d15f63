"""What runs on every version of JAX is listed by name in once.py: a name that is gone would drop a test in silence."""

from pathlib import Path

import pytest
from once import ONCE

HERE = Path(__file__).parent


@pytest.mark.parametrize("place", ONCE)
def test_what_is_listed_is_there(place, request):
    assert (HERE / place).exists()
    collected = {item.name for item in request.session.items if item.path == HERE / place}
    for name in ONCE[place]:
        function, bracket, _ = name.partition("[")
        assert f"def {function}(" in (HERE / place).read_text(), f"{place} has no {function}"
        if bracket and collected:  # by this run: names with parameters are known then
            assert name in collected, f"{place} has no {name}"


def test_what_a_module_makes_once_is_made_by_one_worker(request):
    """Tests that share a fixture of their module are in one group of pytest-xdist, be they in another one or not."""
    groups: dict[tuple, set] = {}
    for item in request.session.items:
        for name, known in item._fixtureinfo.name2fixturedefs.items():
            if known[-1].scope == "module":
                value = str(getattr(item, "callspec", None) and item.callspec.params.get(name))
                names = tuple(sorted(mark.args[0] for mark in item.iter_markers("xdist_group")))
                groups.setdefault((item.path, name, value), set()).add(names)
    assert all(len(found) == 1 and all(found) for found in groups.values()), groups
