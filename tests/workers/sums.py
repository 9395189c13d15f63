"""How exact sums over many replicas are: `python sums.py REPLICAS`, one line of JSON.

Each replica has one example, so that its term of a gradient is one product, and the exact sum is known in float64.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import shardstep
from shardstep import Options

REPLICAS = int(sys.argv[1])
WIDTHS = ((512, 128), (384, 131), (7, 5))  # large, large on few replicas, and small: all-reduced
jax.config.update("jax_num_cpu_devices", REPLICAS)


def step(state, batch):
    """What is left of the state is the gradient."""

    def loss(weights):
        return sum(jnp.sum((x @ w) * y) for w, (x, y) in zip(weights, batch, strict=True)).astype(jnp.float32)

    return [w - g for w, g in zip(state, jax.grad(loss)(state), strict=True)]


def batch_in(dtype):
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(WIDTHS)))
    return [tuple(jax.random.normal(next(keys), (REPLICAS, d)).astype(dtype) for d in widths) for widths in WIDTHS]


def measured(dtype, **options):
    """Of each leaf: the largest error of the gradient, and how much of it rounding the exact sum once explains."""
    batch = batch_in(dtype)
    state = [jnp.zeros(widths, dtype) for widths in WIDTHS]
    sharded = shardstep.shard(step, batch_argnums=1, weights="replicated", options=Options(**options))
    plan = sharded.plan(state, batch)
    made = [-np.asarray(w, np.float64) for w in sharded(state, batch)]
    found = []
    for gradient, (x, y) in zip(made, batch, strict=True):
        terms = np.asarray((x[:, :, None] * y[:, None, :]), np.float64)  # each rounded to `dtype`
        exact = terms.sum(0)
        rounded = np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype), np.float64)
        one_by_one = np.zeros(exact.shape, dtype)
        for term in terms:
            one_by_one = (one_by_one + term.astype(dtype)).astype(dtype)
        found.append(
            {
                "error": float(np.abs(gradient - exact).max()),
                "rounding": float(np.abs(rounded - exact).max()),
                "in order": float(np.abs(one_by_one.astype(np.float64) - exact).max()),
                "differing": float(np.mean(gradient != rounded)),
                "largest term": float(np.abs(terms).max()),
                "exact": bool(np.allclose(gradient, exact, rtol=1e-5, atol=1e-5)),
            }
        )
    sent = sorted((c.kind, c.dtype, round(c.bytes)) for c in plan.collectives)
    return {"leaves": found, "sent": sent, "wire": plan.wire_bytes.sharded}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "reduce": measured(jnp.bfloat16, reduce="float32"),
                "narrow": measured(jnp.float32, reduce="float32", reduce_dtype=jnp.bfloat16),
                "plain": measured(jnp.bfloat16),
                "int8": measured(jnp.float32, wire="int8"),
            }
        )
    )
