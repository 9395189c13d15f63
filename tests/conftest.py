"""Eight simulated replicas for every test, and how hard Hypothesis searches.

The devices must be asked for before JAX starts its backend; pytest imports this file first, in each xdist worker too.
"""

from __future__ import annotations

import functools
import math
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck, settings

REPLICAS = 8
jax.config.update("jax_num_cpu_devices", REPLICAS)

# One example traces and compiles two programs: deadlines and "too slow" checks would only measure XLA.
COMPILING = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# The same examples on every run: a red run is red for everybody.
settings.register_profile("ci", derandomize=True, max_examples=20, database=None, **COMPILING)
# New examples each time, until SHARDSTEP_FUZZ_UNTIL (seconds since the epoch; `make fuzz` sets it).
settings.register_profile("fuzz", max_examples=200, print_blob=True, **COMPILING)
settings.load_profile("ci")

FUZZ_UNTIL = float(os.environ.get("SHARDSTEP_FUZZ_UNTIL", "inf"))


def pytest_collection_modifyitems(items):
    for item in items:
        test = getattr(getattr(item, "obj", None), "hypothesis", None)
        if test is not None and math.isfinite(FUZZ_UNTIL):
            test.inner_test = until_time_is_up(test.inner_test)


def until_time_is_up(test):
    """Stop trying new examples at FUZZ_UNTIL; one is always tried, and a failure is still shrunk and reported."""
    tried = failed = False

    @functools.wraps(test)
    def run(*args, **kwargs):
        nonlocal tried, failed
        if tried and not failed and time.time() > FUZZ_UNTIL:
            pytest.skip("the time for fuzzing is up")
        tried = True
        try:
            return test(*args, **kwargs)
        except hypothesis.errors.HypothesisException:  # a rejected example is no failure
            raise
        except Exception:
            failed = True
            raise

    return run


@pytest.fixture(scope="session")
def mesh():
    """All eight replicas on one axis."""
    return jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
