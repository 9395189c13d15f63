"""shardstep: shard the weight update of an unchanged JAX training step across data-parallel replicas."""

import importlib
from typing import Any

from .api import ShardedStep, shard
from .check import check
from .checkpoint import Saving, finish, latest_step, restore, save
from .errors import ShardstepError
from .options import Options
from .padded import Padded
from .plan import Plan
from .rules import register_rule
from .state import logical

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
        return importlib.import_module(f".integrations.{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
