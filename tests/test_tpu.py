"""What the TPU compiler makes of a rewritten step. `libtpu` compiles ahead of time: no TPU is needed.

The compiler runs in a process of its own, because libtpu serves one process at a time and stays for good.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardstep._src.core.tiles import major_to_minor

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install .[tpu]"
    ),
]

WIDTH, LAYERS = 1024, 2
WEIGHT = 4 * WIDTH * WIDTH
SHAPES = [(1024, 16, 64), (64, 16, 64), (256, 4, 64), (16, 64, 1024), (4096, 64), (300, 2), (1, 1, 256, 64), (512, 512)]

PROGRAM = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shardstep._src.tools.hlo import collectives
import shardstep

WIDTH, LAYERS = int(sys.argv[1]), int(sys.argv[2])
OPTIMIZER = optax.adam(1e-3)

def step(state, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)
    params, moments = state
    value, grads = jax.value_and_grad(loss)(params)
    changes, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, changes), moments), value

FIRST = rf"= f32\\[{WIDTH},\\d+\\]\\S* reduce-scatter\\(.*replica_groups=(.*?), use_global_device_ids"

params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
state = (params, jax.eval_shape(OPTIMIZER.init, params))

def compiled(machine, weights):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=machine).devices
    mesh = Mesh(np.array(sorted(devices, key=lambda d: d.id)), ("data",))
    x = jax.ShapeDtypeStruct((WIDTH * mesh.size, WIDTH), jnp.float32)  # so many that weights go to them
    sharded = shardstep.shard(step, mesh, batch_argnums=1, weights=weights)
    text = sharded.lower(state, x).compile().as_text()
    return {
        "rings": [a.size for a in sharded.replicas.axes],
        "note": sharded.replicas.note,
        "collectives": [(c.kind, c.bytes, c.group) for c in collectives(text)],
        # the groups along which whole gradients are scattered into columns
        "first": re.findall(FIRST, text),
        "copies": len(re.findall(r"= f32\\[\\d+,\\d+\\]\\S* copy\\(", text)),
    }

def orders(shapes):  # from major to minor, how libtpu lays arguments out
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    everywhere = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
    step = jax.jit(lambda *xs: [x + 1 for x in xs], in_shardings=everywhere, out_shardings=everywhere)
    text = step.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()
    entry = re.search(r"entry_computation_layout={\\((.*?)\\)->", text)[1]
    return [[int(d) for d in found.split(",")][::-1] for found in re.findall(r"\\]{([\\d,]+):", entry)]

def normalised(machine):  # each layer by mean and variance over the batch, as BatchNorm does
    def loss(params, x):
        for w in params:
            y = x @ w
            mean, square = jnp.mean(y, 0), jnp.mean(y * y, 0)
            x = (y - mean) * jax.lax.rsqrt(square - mean * mean + 1e-3)
        return jnp.sum(jnp.tanh(x) ** 2)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=machine).devices
    mesh = Mesh(np.array(sorted(devices, key=lambda d: d.id)), ("data",))
    x = jax.ShapeDtypeStruct((8 * mesh.size, WIDTH), jnp.float32)
    def descend(params, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))
    sharded = shardstep.shard(descend, mesh)
    lowered = sharded.lower(params, x)
    found = collectives(lowered.compile().as_text())
    return {
        "planned": [c.tensors for c in sharded.plan(params, x).collectives if c.kind == "all-reduce"],
        "compiled": [c.arrays for c in found if c.kind == "all-reduce"],
        "packed": lowered.as_text().count("stablehlo.concatenate"),
    }

asked = [("v3:2x2", "replicated"), ("v3:2x2", "sharded"), ("v5e:4x4", "replicated"), ("v5e:4x4", "sharded"),
         ("v5p:2x2x2", "sharded"), ("v6e:2x4", "sharded")]
found = {f"{machine} {weights}": compiled(machine, weights) for machine, weights in asked}
found |= {"orders": orders(json.loads(sys.argv[3])), "normalised": normalised("v5e:2x2")}
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def programs():
    root = Path(__file__).parent.parent
    path = [str(root / "benchmarks"), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    env["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # somebody else on this machine may be compiling for TPUs too
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(WIDTH), str(LAYERS), json.dumps(SHAPES)],
        capture_output=True,
        text=True,
        timeout=900,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


RINGS = {
    "v3:2x2 replicated": [2, 4],
    "v3:2x2 sharded": [2, 4],
    "v5e:4x4 replicated": [4, 4],
    "v5e:4x4 sharded": [4, 4],
    "v5p:2x2x2 sharded": [2, 2, 2],
    "v6e:2x4 sharded": [4, 2],
}


@pytest.mark.parametrize("name", RINGS)
def test_one_true_scatter_for_each_ring(programs, name):
    """Every gradient is scattered along every ring, by a reduce-scatter: no all-reduce of its size is left."""
    found = programs[name]
    assert found["rings"] == RINGS[name] and not found["note"]
    large = [(kind, group) for kind, size, group in found["collectives"] if size > 65536]
    scattered = sorted(group for kind, group in large if kind == "reduce-scatter")
    assert scattered == sorted(RINGS[name] * LAYERS)
    assert {kind for kind, _ in large} == {"reduce-scatter", "all-gather"}


@pytest.mark.parametrize("name", RINGS)
def test_sharded_weights_are_gathered_in_bfloat16(programs, name):
    """The matrix unit reads bfloat16, and the compiler moves the cast in front of the gather: half the bytes."""
    gathered = [size for kind, size, _ in programs[name]["collectives"] if kind == "all-gather"]
    whole = WEIGHT if name.endswith("replicated") else WEIGHT // 2
    assert gathered.count(whole) == LAYERS and max(gathered) == whole


def test_state_is_not_transposed(programs):
    """Left alone, the compiler transposes all state on v6e to match a transposed gradient."""
    assert programs["v6e:2x4 sharded"]["copies"] == 0


def test_dimensions_lie_as_placement_says(programs):
    assert [tuple(order) for order in programs["orders"]] == [major_to_minor(shape) for shape in SHAPES]


def test_gathered_weights_are_written_in_place(programs):
    """Left alone, the compiler copies donated weights out of their buffers, and the gathered ones into them."""
    assert programs["v3:2x2 replicated"]["copies"] == 0


@pytest.mark.parametrize("name", ["v5e:4x4 replicated", "v5e:4x4 sharded"])
def test_tensors_take_turns_on_the_axes(programs, name):
    """The two gradients begin with different axes of the torus. Sharded weights need no copy for it."""
    assert len(programs[name]["first"]) == len(set(programs[name]["first"])) == LAYERS
    assert name.endswith("replicated") or programs[name]["copies"] == 0


def test_small_sums_travel_together_and_are_not_packed(programs):
    """The compiler sends what stands side by side in one message, without copying it."""
    found = programs["normalised"]
    assert not found["packed"] and max(found["planned"]) > 1
    assert sorted(found["compiled"]) == sorted(found["planned"])
