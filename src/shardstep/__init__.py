"""shardstep: shard the weight update of an unchanged JAX training step across data-parallel replicas."""

from .api import ShardedStep, shard
from .check import check
from .errors import ShardstepError
from .options import Options
from .padded import Padded
from .plan import Plan
from .rules import register_rule
from .state import logical

__version__ = "0.1.0"

__all__ = ["Options", "Padded", "Plan", "ShardedStep", "ShardstepError", "check", "logical", "register_rule", "shard"]
