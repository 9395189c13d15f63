"""Imports point down the house, and no room is too large: DESIGN's section on the packages, as a test.

Every import counts: those inside functions and those for type checkers alone, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardstep

PACKAGE = Path(shardstep.__file__).parent
ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"
MODULES = {
    ".".join(("shardstep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
BELOW = {
    "core": set(),
    "machine": {"core"},
    "rules": {"core"},
    "capture": {"core"},
    "planning": {"core", "machine", "rules", "capture"},
    "runtime": {"core", "machine", "rules", "capture"},
    "checkpoint": {"core", "capture", "planning", "runtime"},
    "api": {"core", "machine", "rules", "capture", "planning", "runtime"},
    "tools": {"core", "machine", "rules", "capture", "planning", "runtime", "checkpoint", "api", ""},  # and as users do
}
# a plan draws itself and creates its state: what does that is imported when it is asked to
WITHIN = {("Plan", "to_html"), ("Plan", "_repr_html_"), ("Plan", "__str__"), ("Plan", "init")}


def imports(name: str) -> Iterator[tuple[str, tuple[str, str], int]]:
    """The modules of the package that a module imports: which, inside which method, and on which line."""
    path = MODULES[name]
    parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def visit(node: ast.AST, inside: tuple[str, str]) -> Iterator[tuple[str, tuple[str, str], int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, (child.name, ""))
            elif isinstance(child, ast.FunctionDef):
                yield from visit(child, (inside[0], child.name))
            elif isinstance(child, ast.Import):
                yield from ((alias.name, inside, child.lineno) for alias in child.names if alias.name in MODULES)
            elif isinstance(child, ast.ImportFrom):
                base = parts[: len(parts) - child.level + 1] if child.level else []
                source = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    found = next((m for m in (f"{source}.{alias.name}", source) if m in MODULES), None)
                    if found:
                        yield found, inside, child.lineno
            else:
                yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), ("", ""))


def room(module: str) -> str:
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["_src"] and len(parts) > 2 else ""


def test_imports_point_down():
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in MODULES
        for imported, inside, line in imports(name)
        if room(name) and room(imported) not in {room(name), *BELOW[room(name)]} and inside not in WITHIN
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_in_architecture_md_says_the_same():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", ARCHITECTURE.read_text(encoding="utf-8"), re.M)
    stated = {package: set(re.findall(r"`(\w+)`", may)) for package, may in rows}
    assert stated == {**BELOW, "tools": set()}  # which may import everything


def test_every_module_has_a_room():
    public = {"shardstep", "shardstep.__main__", "shardstep.rules", "shardstep.nnx", "shardstep.keras"}
    assert {name for name in MODULES if not room(name)} == public | {"shardstep._src"}
    assert {room(name) for name in MODULES} - {""} == set(BELOW)


def test_no_module_imports_itself_over_others():
    needs = {
        name: {found for found, inside, _ in imports(name) if inside not in WITHIN and found != name}
        for name in MODULES
        if room(name)
    }
    done: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for needed in needs.get(name, ()):
                follow(needed, (*path, name))
            done.add(name)

    for name in needs:
        follow(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_one_thought(name):
    text = MODULES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
            assert node.end_lineno - node.lineno < 60, f"{node.name} at line {node.lineno} is too long"
            assert len(parameters) <= 7 or node.name in ("save", "shard", "training"), (
                f"{node.name} at line {node.lineno} misses a noun"
            )
