"""`explain` on two language models, as golden texts; its verdict, and what it says in special cases.

Where a change is meant, regenerate with `PYTHONPATH=tests python tests/tools/test_explain.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from steps import adam_state, adam_step, batch, mesh_of

import shardstep
from shardstep._src.planning.formatting import count, size
from shardstep._src.planning.paths import common, dotted, shortened
from shardstep._src.tools.report.summary import cargoes, families
from shardstep._src.tools.report.terminal import render
from shardstep._src.tools.report.verdict import verdict

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
PROGRAMS = {"gpt2_small": ("--devices", "8"), "llama_70b": ("--topology", "v5p:8x8x8")}


def explained(name):
    """What the command prints, without the spaces at the ends of its lines."""
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    environment["PYTHONPATH"] = str(Path(shardstep.__file__).parents[1])
    command = [sys.executable, "-m", "shardstep", "explain", f"{TESTS / 'language_models.py'}:{name}", *PROGRAMS[name]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


@pytest.mark.once
@pytest.mark.parametrize("name", PROGRAMS)
def test_language_models_are_explained_on_one_screen(name):
    text = explained(name)
    assert text == (GOLDEN / f"explain_{name}.txt").read_text(encoding="utf-8"), __doc__
    lines = text.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    assert lines.index("") <= 10  # the verdict


PLAN = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch())


def test_the_verdict_says_what_is_kept_and_sent():
    said = {s.topic: s.text for s in verdict(PLAN)}
    assert said["Verdict"] == "2.4x less state per device with the same communication"
    assert "144.8 KiB -> 60.8 KiB (42%)" in said["Kept"] and "(100%)" in said["Sent"]
    assert not any(s.worse for s in verdict(PLAN))
    assert all(s.line == s.text and len(s.line) <= 70 for s in verdict(PLAN))  # nothing is cut off


def test_what_is_worse_comes_first_and_is_red():
    total = type(PLAN.wire_bytes)
    worse = replace(PLAN, wire_bytes=total(100.0, 151.0))
    first, second, *rest = verdict(worse)
    assert first.worse and first.text == "worse than the replicated step: sent; but 2.4x less state"
    assert second.topic == "Sent" and second.worse and "(151%)" in second.text
    assert not any(s.worse for s in rest)
    slightly = next(s for s in verdict(replace(PLAN, wire_bytes=total(10.2 * 2**20, 10.24 * 2**20 + 2**14))))
    assert slightly.worse
    sent = next(s for s in verdict(replace(PLAN, wire_bytes=total(2**24, 2**24 + 2**15 * 3))) if s.topic == "Sent")
    assert sent.text == "per device and step 16.0 MiB -> 16.1 MiB (101%)"
    sent = next(s for s in verdict(replace(PLAN, wire_bytes=total(2**23, 2**23 + 2**16 * 0.7))) if s.topic == "Sent")
    assert sent.text == "per device and step 8.0 MiB -> 8.0 MiB (101%, 44.8 KiB more)"
    grid = next(iter(render(worse)))
    styles = [str(cell.style) for cell in grid.columns[1]._cells]
    assert styles[:2] == ["bold red", "bold red"] and "bold red" not in styles[2:]


def test_host_memory_is_told_in_as_few_lines():
    moments = tuple(replace(leaf, memory="pinned_host") if leaf.role == "auxiliary" else leaf for leaf in PLAN.leaves)
    away = replace(PLAN, leaves=moments, why_offload="nothing else fits", lossy="gradients travel in 8 bits " * 5)
    said = {s.topic: s for s in verdict(away)}
    assert len(said) <= 9 and said["Host"].text.endswith("per device in host memory (nothing else fits)")
    assert said["Precision"].line == said["Precision"].text  # what is worse is told to the end


def test_nothing_sharded_is_said():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    plan = shardstep.shard(step, mesh_of(8), weights="replicated").plan(jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert verdict(plan)[0].text == "nothing is sharded: the step runs as replicated data parallelism"


def test_one_replica_is_said():
    plan = shardstep.shard(adam_step, mesh_of(1)).plan(adam_state(), batch())
    first, peak = verdict(plan)
    assert first.text == "one replica: there is nothing to share, so the step runs as it is"
    assert "replicated" not in peak.text
    assert {leaf.layout for leaf in plan.leaves} == {"replicated"} and plan.auxiliary_share == 0
    text = str(plan)
    assert "for one replica: there is nothing to share" in text
    assert not re.search(r"split|sharded|gathered|XLA|1 replicas", text)
    assert "on 1 replica<" in plan._repr_html_()
    assert "Nothing is sent." in [str(part).strip() for part in render(plan)]


def test_collectives_are_named_after_what_they_carry():
    apart = shardstep.shard(adam_step, mesh_of(8), options=shardstep.Options(bucket_bytes=0))
    sent = {cargo.what: cargo.how for cargo in cargoes(apart.plan(adam_state(), batch()))}
    assert sent["gradient of w1"] == sent["gradient of w2"] == "reduce-scatter f32"
    assert sent["new weight w1"] == "all-gather f32"
    assert sent["result 1"] == sent["gradient of b"] == "all-reduce f32"
    assert len(sent) == 6


def test_names_are_not_guessed_where_they_do_not_follow():
    """A value that is not on its way into a weight is named after what reads it."""

    def step(w, x):
        spread = jnp.sum((x - x.mean(0)) ** 2, 0)  # a sum over the examples that no weight is made of
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.sort(spread)

    plan = shardstep.shard(step, mesh_of(8)).plan(jnp.ones((96, 64)), jnp.ones((24, 96)))
    assert any(cargo.what.startswith("value for ") for cargo in cargoes(plan))


def test_weights_are_shown_with_their_state():
    found = {family.path: family for family in families(PLAN)}
    assert found["w1"].layout == "replicated + split(0)" and found["w1"].before == 3 * 24 * 1024
    assert sum(f.before for f in found.values()) == PLAN.state_bytes.replicated
    assert sum(f.after for f in found.values()) == PLAN.state_bytes.sharded


def test_paths_are_shortened_and_stay_apart():
    assert dotted("state[0]['layers'][3].kernel") == "state.0.layers.3.kernel"
    weights = ["state.params['enc']['w']", "state.params['dec']['w']"]
    short = shortened(weights, ["state.opt_state[0].mu['enc']['w']", "state.step"])
    assert list(short.values()) == ["enc.w", "dec.w", "opt_state.0.mu.enc.w", "step"]
    both = shortened(["a['w']"], ["b['w']"])
    assert set(both.values()) == {"a.w", "b.w"}  # one name for two leaves would lie


def test_a_weight_without_a_name_is_called_by_its_place():
    """State whose weights are one array, or a list: a bare number would say nothing."""

    def step(state, x):
        weights, momentum = state
        loss, gradient = jax.value_and_grad(lambda tree: sum(jnp.mean((x @ w) ** 2) for w in jax.tree.leaves(tree)))(
            weights
        )
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return (jax.tree.map(lambda w, m: w - m, weights, momentum), momentum), loss

    w, x = jnp.ones((96, 64)), jnp.ones((24, 96))
    one = shardstep.shard(step, mesh_of(8)).plan((w, w), x)
    assert [(f.path, f.count) for f in families(one)] == [("state.0", 1)]
    assert "gradient of state.0" in {cargo.what for cargo in cargoes(one)}
    several = shardstep.shard(step, mesh_of(8)).plan(([w, w], [w, w]), x)
    assert [(f.path, f.count) for f in families(several)] == [("state.0.*", 2)]


def test_only_numbers_that_differ_become_stars():
    assert common(["opt.0.mu.layers.0.w", "opt.0.mu.layers.7.w"]) == "opt.0.mu.layers.*.w"
    assert common(["layer3.w"]) == "layer3.w" and common(["blocks[3]"]) == "blocks[3]"


def test_what_travels_together_is_named_after_most_of_it():
    together = {cargo.what for cargo in cargoes(PLAN)}
    assert any(what.startswith("gradient of ") and what.endswith(" and 1 more") for what in together), together


def test_sizes_go_on_after_gibibytes():
    assert size(3 * 2**40) == "3.0 TiB" and size(5000 * 2**40) == "5000.0 TiB" and count(2.5e12) == "2.5T"


if __name__ == "__main__":
    for program in PROGRAMS:
        (GOLDEN / f"explain_{program}.txt").write_text(explained(program), encoding="utf-8")
