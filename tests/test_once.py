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
