"""Every optimizer that Optax has: same numbers, its state sharded, never more bytes on the wire.

The share of the optimizer's state bytes that ended sharded is a property of each test (`sharded_share`, in the JUnit
report) and printed (`pytest -rA`).
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from agreement import F32, differences
from jax.sharding import Mesh
from optimizers import OPTIMIZERS, optimizer_step

import shardstep

BATCH, REPLICAS = 16, 8
