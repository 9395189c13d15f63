"""Programs to explain: GPT-2-small with its layers in a list, and a model of Llama-70B's shapes, scanned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

OPTIMIZER = optax.adamw(1e-4)


def trained(loss, create, batch):
    """(step, example_args) of a model, from shapes alone."""

    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": moments}, {"loss": value}

    params = jax.eval_shape(create)
    return train_step, ({"params": params, "opt_state": jax.eval_shape(OPTIMIZER.init, params)}, batch)


def norm(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def entropy(logits, tokens):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1))


def gpt2_small(width=768, layers=12, heads=12, vocabulary=50257, length=1024, batch=64):
    def create():
        def block():
            return {
                "attn": {"qkv": jnp.zeros((width, 3 * width)), "proj": jnp.zeros((width, width))},
                "mlp": {"fc": jnp.zeros((width, 4 * width)), "proj": jnp.zeros((4 * width, width))},
                "ln1": jnp.ones(width),
                "ln2": jnp.ones(width),
            }

        blocks = [block() for _ in range(layers)]
        tables = {"wte": jnp.zeros((vocabulary, width)), "wpe": jnp.zeros((length, width))}
        return {**tables, "blocks": blocks, "ln_f": jnp.ones(width)}

    def loss(params, tokens):
        x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
        for p in params["blocks"]:
            qkv = (norm(x, p["ln1"]) @ p["attn"]["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
            x = x + attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(x.shape) @ p["attn"]["proj"]
            x = x + jax.nn.gelu(norm(x, p["ln2"]) @ p["mlp"]["fc"]) @ p["mlp"]["proj"]
        return entropy(norm(x, params["ln_f"]) @ params["wte"].T, tokens)

    return trained(loss, create, jax.ShapeDtypeStruct((batch, length), jnp.int32))


def llama_70b(width=8192, layers=80, heads=64, groups=8, hidden=28672, vocabulary=32000, length=4096, batch=512):
    head = width // heads

    def create():
        stacked = {
            "wq": (width, width),
            "wk": (width, groups * head),
            "wv": (width, groups * head),
            "wo": (width, width),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
            "norm1": (width,),
            "norm2": (width,),
        }
        blocks = {name: jnp.zeros((layers, *shape)) for name, shape in stacked.items()}
        tables = {"embed": jnp.zeros((vocabulary, width)), "head": jnp.zeros((width, vocabulary))}
        return {**tables, "layers": blocks, "norm": jnp.ones(width)}

    def block(x, p):
        p = {name: w.astype(jnp.bfloat16) for name, w in p.items()}
        y = norm(x, p["norm1"])
        q = (y @ p["wq"]).reshape(*x.shape[:2], heads, head)
        k, v = (jnp.repeat((y @ p[n]).reshape(*x.shape[:2], groups, head), heads // groups, 2) for n in ("wk", "wv"))
        x = x + attention(q, k, v).reshape(x.shape) @ p["wo"]
        y = norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params, tokens):
        x = params["embed"].astype(jnp.bfloat16)[tokens]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
        return entropy(
            (norm(x, params["norm"].astype(x.dtype)) @ params["head"].astype(x.dtype)).astype(jnp.float32), tokens
        )

    return trained(loss, create, jax.ShapeDtypeStruct((batch, length), jnp.int32))
