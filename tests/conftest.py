"""Eight simulated replicas for every test, and how hard Hypothesis searches.

The devices must be asked for before JAX starts its backend; pytest imports this file first, in each xdist worker too.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import pytest
from hypothesis import HealthCheck, settings

REPLICAS = 8
jax.config.update("jax_num_cpu_devices", REPLICAS)

# One example traces and compiles two programs: deadlines and "too slow" checks would only measure XLA.
COMPILING = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# The same examples on every run: a red run is red for everybody. `make test-all` tries the same ones and more.
settings.register_profile("ci", derandomize=True, max_examples=2, database=None, **COMPILING)
settings.register_profile("thorough", derandomize=True, max_examples=20, database=None, **COMPILING)
settings.load_profile("ci")


# Marked `once`: what these test lies in our own code. New files run on every version until they are listed here.
ONCE = (
    "benchmarks",
    "checkpoint",
    "machine",
    "planning/test_torus_order.py",
    "runtime/test_processes.py",
    "test_architecture.py",
    "test_examples.py",
    "test_imports.py",
    "test_public_names.py",
    "tools/test_cli.py",
    "tools/test_report.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / place) for place in ONCE):
            item.add_marker(pytest.mark.once)


@pytest.fixture
def quick_to_compile():
    """For tests of numbers that run a program a few times: compiling it well takes longer than running it badly.

    Tests of the compiled program itself must not use it. Nor those that compare bit for bit.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def mesh():
    """All eight replicas on one axis."""
    return jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
