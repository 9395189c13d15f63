"""ARCHITECTURE.md shows what each pass makes of a six-line step. Regenerate: `python tests/test_architecture.py`."""

import os
import re
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import shardstep
from shardstep._src.core import passes

TEXT = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"
PRINTED = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
PASSES = ("capture", "simplification", "roles", "at rest (weights replicated)", "propagation", "precision", "buckets")


def record(code: str) -> passes.Trace:
    scope = {"jax": jax, "jnp": jnp}
    exec(compile(code, "step.py", "exec"), scope)
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices()[:8])
    options = shardstep.Options(min_shard_bytes=0)
    step = shardstep.shard(scope["step"], mesh, weights="replicated", options=options)
    f32 = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    with passes.recording() as trace:
        step.plan({"w": f32["w"], "m": f32["w"]}, {"x": f32["x"], "y": f32["y"]})
    return trace


SHAPES = {"w": (64, 32), "x": (16, 64), "y": (16, 32)}


def the_step(text: str) -> str:
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


def test_the_printed_passes_are_those_of_the_printed_step():
    text = TEXT.read_text(encoding="utf-8")
    trace = record(the_step(text))
    assert trace.names == PASSES
    assert PRINTED.search(text)[0].strip() == str(trace), "regenerate with: python tests/test_architecture.py"


def test_nothing_is_recorded_outside_of_a_recording():
    with passes.recording() as trace:
        pass
    passes.leave("a pass", 1)
    assert trace.names == ()


def test_bodies_are_indented_and_their_transfers_stand_in_front():
    def step(w, x):
        def micro(total, part):
            return total + jax.grad(lambda w: jnp.sum((part @ w) ** 2))(w), None

        total, _ = jax.lax.scan(micro, jnp.zeros_like(w), x.reshape(2, 8, 16))
        return w - total

    with passes.recording() as trace:
        shardstep.shard(step, options=shardstep.Options(engine="rewrite")).plan(jnp.ones((16, 8)), jnp.ones((16, 16)))
    program, schedule = (str(next(p.result for p in trace.passes if p.name == n)) for n in ("capture", "buckets"))
    assert re.search(r"^[a-z]+:\S+.* = scan\[.*\n  body\n    inputs ", program, re.MULTILINE)
    body = schedule.index("  body, 2 times\n    inputs ")
    assert body < schedule.index("all-reduce ") or "reduce-scatter " in schedule[body:]


if __name__ == "__main__":
    page = TEXT.read_text(encoding="utf-8")
    trace = record(the_step(page))
    TEXT.write_text(PRINTED.sub(lambda _: f"{trace}\n", page), encoding="utf-8")
