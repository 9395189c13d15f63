"""shardstep: shard the weight update of an unchanged JAX training step across data-parallel replicas."""

import importlib
from typing import Any

from ._src.api import ShardedStep, shard
from ._src.checkpoint.saving import Saving, finish, latest_step, restore, save
from ._src.core.errors import ShardstepError
from ._src.core.options import Options
from ._src.core.padded import Padded
from ._src.planning.plan import Plan
from ._src.rules import register_rule
from ._src.runtime.placing import logical
from ._src.tools.check import check

__version__ = "0.1.0"

__all__ = [
    "Options",
    "Padded",
    "Plan",
    "Saving",
    "ShardedStep",
    "ShardstepError",
    "check",
    "finish",
    "latest_step",
    "logical",
    "register_rule",
    "restore",
    "save",
    "shard",
]


def __getattr__(name: str) -> Any:
    """`shardstep.nnx` and `shardstep.keras` import their frameworks, so they are imported when first used."""
    if name in ("nnx", "keras"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
