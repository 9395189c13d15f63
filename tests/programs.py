"""Factories for the command line to look at. Plain files, as a user has them."""

import jax
import jax.numpy as jnp


def mlp(width=64):
    """A small network with Adam; its weights are 16 KiB each."""

    def step(state, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["first"])
            return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mean)
        return {"params": params, "mean": mean, "count": state["count"] + 1}, {"loss": value}

    keys = jax.random.split(jax.random.key(0), 4)
    params = {"first": jax.random.normal(keys[0], (64, width)), "second": jax.random.normal(keys[1], (width, 64))}
    state = {"params": params, "mean": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)}
    batch = {"x": jax.random.normal(keys[2], (16, 64)), "y": jax.random.normal(keys[3], (16, 64))}
    return step, (state, batch)


def enormous():
    """12 TB of state. Only its shapes fit anywhere."""
    return mlp(2**34)


def left_to_xla():
    import shardstep

    step, args = mlp()
    return shardstep.shard(step, options=shardstep.Options(engine="annotate")), args


def weights_sharded():
    import shardstep

    step, args = mlp()
    return shardstep.shard(step, weights="sharded"), args


def shapes():
    step, args = mlp()
    return step, jax.eval_shape(lambda: args)


def values():
    """Looks at its own values, so it cannot be run on shapes alone."""
    step, (state, batch) = mlp()
    assert float(batch["x"].sum()) != 0.0
    return step, (state, batch)


def forgetful():
    """A random stream that shardstep cannot know of: plain and sharded run differ."""
    step, args = mlp()
    calls = []

    def drifting(state, batch):
        calls.append(None)
        state, metrics = step(state, batch)
        return state, {"loss": metrics["loss"] + len(calls)}

    return drifting, args


def fallback():
    def step(state, batch):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        moment = jnp.fft.fft(state["m"], axis=0).real * 0.1 + grads
        return {"w": state["w"] - moment, "m": moment}, value

    return step, ({"w": jnp.ones((64, 64)), "m": jnp.ones((64, 64))}, jnp.ones((16, 64)))


def uneven():
    """Twelve examples."""
    step, (state, batch) = mlp()
    return step, (state, jax.tree.map(lambda x: x[:12], batch))


def one_replica():
    """A step as for `pmap`."""
    import shardstep

    def step(state, batch):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        moment = 0.9 * state["m"] + jax.lax.pmean(grads, "batch")
        return {"w": state["w"] - 0.1 * moment, "m": moment}, jax.lax.pmean(value, "batch")

    state = {"w": jnp.ones((64, 64)), "m": jnp.zeros((64, 64))}
    return shardstep.shard(step, axis_name="batch"), (state, jnp.ones((16, 64)))


def raises():
    raise RuntimeError("the data set is not here")


def returns_a_number():
    return 3


NOT_A_FUNCTION = 3


def many_leaves(weights=3333):
    """Adam on 3,333 weights: a state of 10,000 leaves."""

    def step(state, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.tanh(x @ w) if w.ndim == 2 else x + w
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        count = state["count"] + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["square"], grads)

        def update(p, m, v):
            return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8)

        params = jax.tree.map(update, state["params"], mean, square)
        return {"params": params, "mean": mean, "square": square, "count": count}, value

    params = [jax.ShapeDtypeStruct((64, 64) if i % 2 else (64,), jnp.float32) for i in range(weights)]
    state = {"params": params, "mean": params, "square": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    return step, (state, jax.ShapeDtypeStruct((64, 64), jnp.float32))
