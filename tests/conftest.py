"""Eight simulated replicas for every test, and how hard Hypothesis searches.

The devices must be asked for before JAX starts its backend; pytest imports this file first, in each xdist worker too.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jaxlib.version

# Compiling takes four fifths of the suite's time, and programs run a few times on tiny arrays: code that is compiled
# quickly is good enough. Only the machine code differs; the HLO with its collectives is optimized as ever. Processes
# that tests start inherit this. The old emitters of fusions (gone from XLA since) compile several times as fast; CI's
# run on the newest JAX has the new ones. (JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS= make test: compiled as usual.)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if jaxlib.version.__version_info__ < (0, 11):
    quickly = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", quickly)

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


# Marked `once`: what these test lies in our own code. New files run on every version until they are listed here. A test
# that runs on 8 replicas and on other numbers `n` of them runs on every version with 8: the rest is our own code, too.
ONCE = (
    "benchmarks",
    "checkpoint",
    "core",
    "machine",
    "planning/test_buckets.py",
    "planning/test_costs.py",
    "planning/test_followers.py",
    "planning/test_precision.py",
    "planning/test_torus_order.py",
    "runtime/test_call_cache.py",
    "runtime/test_conversions.py",
    "runtime/test_interrupts.py",
    "runtime/test_processes.py",
    "test_architecture.py",
    "test_examples.py",
    "test_imports.py",
    "test_mutations.py",
    "test_public_names.py",
    "tools/test_cli.py",
    "test_uneven_axes.py",
    "tools/test_report.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    on_eight = {function(item) for item in items if replicas(item) == REPLICAS}
    for item in items:
        repeated = function(item) in on_eight and replicas(item) != REPLICAS
        if repeated or any(item.path.is_relative_to(here / place) for place in ONCE):
            item.add_marker(pytest.mark.once)


def function(item):
    return item.path, getattr(item, "originalname", item.name)


def replicas(item):
    """The number of replicas `n` that a test is run with, where it says so."""
    return getattr(item, "callspec", None) and item.callspec.params.get("n")


@pytest.fixture(scope="session")
def mesh():
    """All eight replicas on one axis."""
    return jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
