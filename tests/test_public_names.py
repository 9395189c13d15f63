"""The public names and their signatures are frozen in golden/public_names.txt.

Where a change is meant, regenerate with `python tests/test_public_names.py` and say so in CHANGELOG.md.
"""

import importlib
import inspect
import re
from pathlib import Path

import jax

import shardstep

GOLDEN = Path(__file__).parent / "golden" / "public_names.txt"
MODULES = ("shardstep", "shardstep.rules", "shardstep.nnx", "shardstep.keras")
OURS = ("Plan", "Saving", "ShardedStep")  # users are given these and make none


def signature(value: object) -> str:
    try:
        return re.sub(r"ForwardRef\((.*?)\)(?=[,)])", r"\1", str(inspect.signature(value)).replace("'", ""))
    except (TypeError, ValueError):
        return ""


def members(name: str, value: type) -> list[str]:
    lines = []
    for attribute in sorted(vars(value)):
        held = inspect.getattr_static(value, attribute)
        if attribute.startswith("_") and attribute != "__call__":
            continue
        if issubclass(value, jax.Array) and hasattr(jax.Array, attribute):  # JAX's own, which differ between versions
            continue
        held = held.__func__ if isinstance(held, classmethod | staticmethod) else held
        shown = signature(held) if inspect.isfunction(held) else ""
        lines.append(f"  {name}.{attribute}{shown}")
    return lines


def listing() -> str:
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == name]
        names = getattr(module, "__all__", [n for n in defined if not n.startswith("_")])
        lines.append(name)
        for public in sorted(names):
            value = getattr(module, public)
            own = getattr(value, "__module__", "").startswith("shardstep")
            lines.append(f"  {public}{signature(value) if own and callable(value) and public not in OURS else ''}")
            lines += [f"  {line}" for line in members(public, value)] if own and inspect.isclass(value) else []
    return "\n".join(lines) + "\n"


def test_public_names_and_signatures_are_frozen():
    assert listing() == GOLDEN.read_text(encoding="utf-8"), __doc__


def test_dir_shows_the_public_names_only():
    assert set(dir(shardstep)) == {*shardstep.__all__, "keras", "nnx", "rules", "__version__"}


if __name__ == "__main__":
    GOLDEN.write_text(listing(), encoding="utf-8")
