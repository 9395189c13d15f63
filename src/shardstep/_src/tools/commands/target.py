"""The program that a command looks at, named `module:factory` or `path.py:factory`.

`factory()` returns `(step, example_args)`. The step may be plain, or already a `ShardedStep` with settings of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ...api import ShardedStep, shard
from ...core.errors import ShardstepError
from ...core.options import Options


class UsageError(ShardstepError):
    """The command line names something that is not there."""


@dataclass(frozen=True, eq=False)
class Target:
    """A step and arguments to look at it with (arrays, or only their shapes)."""

    step: Callable[..., Any]
    args: tuple[Any, ...]

    def sharded(self, mesh: Mesh, topology: str | None = None, memory: int | None = None, **more: Any) -> ShardedStep:
        """The step on this mesh, with the settings that the factory gave it, and others instead of some of them."""
        settings = {**(self.step.settings.keywords() if isinstance(self.step, ShardedStep) else {}), **more}
        options = settings.get("options") or Options()
        chosen = {name: x for name, x in (("topology", topology), ("memory", memory)) if x is not None}
        settings["options"] = replace(options, **chosen)
        return shard(self.step.step if isinstance(self.step, ShardedStep) else self.step, mesh, **settings)


def find(name: str) -> Callable[[], Any]:
    """The factory that `name` names."""
    where, colon, what = name.rpartition(":")
    if not colon or not where or not what:
        raise UsageError(f"{name!r}: name the program as path.py:factory or module:factory")
    module = _from_file(where) if where.endswith(".py") else _from_module(where)
    factory = getattr(module, what, None)
    if factory is None:
        known = ", ".join(n for n, f in vars(module).items() if callable(f) and not n.startswith("_")) or "nothing"
        raise UsageError(f"{where} has no {what!r}; callable in it: {known}")
    if not callable(factory):
        raise UsageError(f"{name}: {what} is {_describe(factory)}, not a function")
    return factory


def _from_file(path: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"there is no file {path}")
    sys.path.insert(0, str(file.parent))  # as `python path.py` has it: its neighbours can be imported
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise  # the module is there, but something that it imports is not
        raise UsageError(f"there is no module {name!r} (a file is named path.py:factory)") from error


def require_place(option: str, path: str | None) -> None:
    """For a command that writes a file: say so before the work is done if it cannot be written."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no such directory")
    if path is not None and Path(path).is_dir():
        raise UsageError(f"{option} {path}: that is a directory")


def call(factory: Callable[[], Any]) -> Target:
    """Run the factory."""
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], tuple | list):
        raise ShardstepError(
            f"the factory must return (step, example_args): a function and a tuple; it returned {_describe(made)}"
        )
    return Target(made[0], tuple(made[1]))


def require_values(target: Target, command: str) -> None:
    """For a command that runs the step."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ShardstepError(
                f"{command} runs the step, but example_args{jax.tree_util.keystr(path)} is only a shape: let the"
                " factory return arrays (explain takes shapes)"
            )


class NeedsValues(Exception):
    """The factory cannot be run on shapes alone."""


def shapes(factory: Callable[[], Any]) -> Target:
    """Run the factory on shapes alone: a model of any size, and no memory for its weights."""
    found: dict[str, Any] = {}

    def create() -> list[Any]:
        target = call(factory)
        found["step"] = target.step
        found["leaves"], found["tree"] = jax.tree.flatten(target.args)
        return [x for x in found["leaves"] if _has_values(x)]

    jaxpr, made = jax.make_jaxpr(create, return_shape=True)()
    if any(isinstance(d, NamedSharding) for e in jaxpr.eqns for d in e.params.get("devices", ())):
        raise NeedsValues("it lays its arguments out on devices")  # which may say where the examples are
    structs = iter(made)
    leaves = [_struct(next(structs)) if _has_values(x) else x for x in found["leaves"]]
    return Target(found["step"], jax.tree.unflatten(found["tree"], leaves))


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _struct(shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type)


def _describe(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {len(made)}: {', '.join(type(x).__name__ for x in made)}"
    kind = type(made).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
