"""shardstep: shard the weight update of an unchanged JAX training step across data-parallel replicas."""

import importlib
import importlib.metadata
from typing import Any

from ._src.api import ShardedStep, shard
from ._src.checkpoint.resizing import reshape
from ._src.checkpoint.restoring import latest_step, restore
from ._src.checkpoint.saving import Saving, finish, save
from ._src.core.errors import ShardstepError
from ._src.core.options import Options
from ._src.core.padded import Padded
from ._src.planning.plan import Plan
from ._src.rules.contract import register_rule
from ._src.runtime.placing import logical
from ._src.tools.check import check
from ._src.tools.training import Training, training

try:
    __version__ = importlib.metadata.version("shardstep")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Options",
    "Padded",
    "Plan",
    "Saving",
    "ShardedStep",
    "ShardstepError",
    "Training",
    "check",
    "finish",
    "latest_step",
    "logical",
    "register_rule",
    "reshape",
    "restore",
    "save",
    "shard",
    "training",
]

_DOORS = ("keras", "nnx", "rules")  # modules; the first two import their frameworks, so none is imported before its use


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_DOORS, "__version__"])
