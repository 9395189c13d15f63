"""The examples run, their loss falls, and they train as they do without shardstep. So does the README's quick start."""

import importlib
import re
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import shardstep
from shardstep._src.tools.commands.explain import all_devices, plan_for
from shardstep._src.tools.commands.target import shapes

ROOT = Path(__file__).parent.parent
STEPS = 20
LONGEST = 100  # lines

EXAMPLES = {  # name -> the framework that it needs
    "optax_only": "optax",
    "linen": "flax",
    "nnx": "flax",
    "equinox_module": "equinox",
    "haiku_transform": "haiku",
    "keras_fit": "keras",
    "per_replica": "optax",
}


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    sys.modules.pop(name, None)
    try:
        return importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)  # nnx.py must not stand for flax.nnx in other tests


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name, monkeypatch, tmp_path):
    pytest.importorskip(EXAMPLES[name])
    monkeypatch.chdir(tmp_path)
    example = load(name, monkeypatch)
    ours, theirs = example.main(STEPS), example.main(STEPS, plain=True)
    assert len(ours) in (STEPS, STEPS - 2)  # Keras puts a tenth aside
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)
    assert np.mean(ours[-3:]) < 0.8 * ours[0]


def test_llama_learns_to_count(monkeypatch):
    example = load("llama", monkeypatch)
    ours, theirs = example.main(STEPS), example.main(STEPS, plain=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)  # bfloat16
    assert ours[-1] < ours[0] - 0.1


@pytest.mark.parametrize(("model", "topology", "fits"), [("llama_7b", "v5e:2x4", True), ("llama_7b", "v2:2x2", False)])
def test_llama_is_planned_by_shapes_within_memory(model, topology, fits, monkeypatch):
    """Weights and moments of 7 billion parameters take 9.4 GiB on each of 8 devices; a core of v2 has 8."""
    factory = getattr(load("llama", monkeypatch), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_for(shapes(factory), all_devices(), topology).plan
    assert plan.fits == fits
    assert 9.4 * 2**30 < plan.peak_bytes.sharded < 16 * 2**30 < plan.peak_bytes.replicated
    gathers = [c for c in plan.collectives if c.kind == "all-gather" and c.loop]
    assert gathers and {c.dtype for c in gathers} == {"bfloat16"} and {c.times for c in gathers} == {32}


def test_llama_is_planned_for_fewer_examples_than_replicas(monkeypatch):
    """Two axes of the torus would cut the heads, and the second finds too little left of them."""
    llama = load("llama", monkeypatch)
    step, (state, _) = llama.tiny()
    options = shardstep.Options(topology="v5p:2x2x2", min_shard_bytes=0)
    one = jax.ShapeDtypeStruct((1, llama.TINY.length + 1), np.int32)
    plan = shardstep.shard(step, all_devices(), batch_argnums=1, options=options).plan(state, one)
    assert plan.wire_bytes.sharded > 0


def test_checkpoint_and_resume(monkeypatch, tmp_path):
    """A run that was stopped after its last checkpoint goes on as if nothing had been."""
    example = load("optax_only", monkeypatch)
    whole = example.main(30, checkpoints=tmp_path / "whole")
    example.main(25, checkpoints=tmp_path / "stopped")
    resumed = example.main(30, checkpoints=tmp_path / "stopped")
    assert len(resumed) == 5
    np.testing.assert_allclose(resumed, whole[25:], rtol=1e-6)


def test_the_loss_is_plotted(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    load("loop", monkeypatch).plot([3.0, 2.0, 1.0], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_short(path):
    if path.stem in (*EXAMPLES, "torch_module"):
        assert len(path.read_text().splitlines()) <= LONGEST


def test_every_example_is_tested():
    others = {"loop", "distributed", "torch_module", "llama"}  # tested elsewhere, or needing what CI does not install
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, *others}


# -- documentation that is code ---------------------------------------------------------------------------------------


def blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.S)


def test_the_quick_start_of_the_readme_runs_as_written():
    quick_start = blocks("README.md")[0]
    assert "shardstep.shard(" in quick_start
    space = {}
    exec(compile(quick_start, "README.md", "exec"), space)
    losses = space["losses"]
    assert losses[-1] < 0.5 * losses[0]
    assert not jax.tree.leaves(space["state"][1])[1].sharding.is_fully_replicated


def test_the_guide_for_migrants_runs_as_written():
    space = {}
    for block in blocks("docs/migrate.md"):
        exec(compile(block, "docs/migrate.md", "exec"), space)
    same = {"rtol": 1e-5, "atol": 1e-6}
    weights = np.asarray(space["before"][0]["w"])
    np.testing.assert_allclose(np.asarray(space["after"][0]["w"]), weights, **same)
    np.testing.assert_allclose(np.asarray(space["by_pmap"][0]["w"][0]), weights, **same)
    np.testing.assert_allclose(np.asarray(space["by_shardstep"][0]["w"]), weights, **same)
    assert any(leaf.role == "weight" and "split" in leaf.layout for leaf in space["plan"].leaves)
