"""Eight simulated replicas for every test, and how hard Hypothesis searches.

The devices must be asked for before JAX starts its backend; pytest imports this file first, in each xdist worker too.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

# Each simulated replica factorizes matrices on a thread of its own. OpenBLAS gives each of them threads that spin while
# they wait for each other: three steps of GaLore took 35 seconds of processor time instead of 0.8 on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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
from once import is_ours

REPLICAS = 8
jax.config.update("jax_num_cpu_devices", REPLICAS)

# One example traces and compiles two programs: deadlines and "too slow" checks would only measure XLA.
COMPILING = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# The same examples on every run: a red run is red for everybody. `make test-all` tries the same ones and more.
settings.register_profile("ci", derandomize=True, max_examples=2, database=None, **COMPILING)
settings.register_profile("thorough", derandomize=True, max_examples=20, database=None, **COMPILING)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """A test that runs on 8 replicas and on other numbers `n` of them runs on every version of JAX with 8."""
    on_eight = {function(item) for item in items if replicas(item) == REPLICAS}
    for item in items:
        repeated = function(item) in on_eight and replicas(item) != REPLICAS
        if repeated or is_ours(item.path, item.name):
            item.add_marker(pytest.mark.once)
        if (shared := shared_fixtures(item)) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(shared))


def shared_fixtures(item):
    """The module whose fixtures a test shares with others (with one choice of their parameters): one worker runs all
    of these tests, and makes what they share once.
    """
    known = item._fixtureinfo.name2fixturedefs
    names = [name for name in sorted(known) if known[name][-1].scope == "module"]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return names and " ".join([item.path.stem, *(str(params[name]) for name in names if name in params)])


def function(item):
    return item.path, getattr(item, "originalname", item.name)


def replicas(item):
    """The number of replicas `n` that a test is run with, where it says so."""
    return getattr(item, "callspec", None) and item.callspec.params.get("n")


@pytest.fixture(scope="session")
def mesh():
    """All eight replicas on one axis."""
    return jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
