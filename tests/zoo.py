"""The zoo: small training programs as people write them, for tests that compare the plain with the sharded program.

Every entry of `ZOO` is a function `make(batch=8) -> Program`, where `batch` is the global batch size (even for
`accumulation_loop`). A program's step takes its state first and the batch after it, and returns its state first
and the metrics last (the loss, or a dict with "loss" in it):

    program = ZOO["transformer"](batch=16)
    jitted = program.jit(program.step)               # jax.jit, or what the framework has instead (eqx.filter_jit)
    *state, metrics = jitted(*program.state, *program.batches[0])

`run(program)` chains the steps over `program.batches`. Nothing here knows shardstep. The programs draw their weights
and their data from fixed seeds; several weights of each are 16 KiB or more, so that there is something to shard.
Layers whose true gradient is zero (biases ahead of a normalisation, attention key biases) are left out: an
adaptive optimizer would blow their rounding noise up to full-size updates, which says nothing about a program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import lax

STEPS = 3


@dataclass(frozen=True)
class Program:
    step: Callable  # step(*state, *batch) -> (*state, metrics)
    state: tuple[Any, ...]
    batches: tuple[tuple[Any, ...], ...]  # the arguments after the state, one tuple for each step
    batch_argnums: tuple[int, ...]  # which arguments of the step hold the examples
    batch_axis: int = 0  # the dimension of those arguments that counts the examples
    jit: Callable = jax.jit


ZOO: dict[str, Callable[..., Program]] = {}


def entry(make: Callable[..., Program]) -> Callable[..., Program]:
    ZOO[make.__name__] = make
    return make


def run(program: Program, step: Callable | None = None) -> tuple[tuple[Any, ...], list[Any]]:
    """The last state and the metrics of every step."""
    step = program.jit(program.step) if step is None else step
    state, history = program.state, []
    for batch in program.batches:
        *state, metrics = step(*state, *batch)
        history.append(metrics)
    return tuple(state), history


# --- data ------------------------------------------------------------------------------------------------------------


def keys(seed: int, count: int = STEPS) -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(seed), count))


def normal(key, *shape) -> jax.Array:
    return jax.random.normal(key, shape)


def dense_init(key, inputs: int, outputs: int) -> jax.Array:
    return jax.random.normal(key, (inputs, outputs)) / inputs**0.5


def tokens(batch: int, length: int = 16, vocab: int = 256) -> list[jax.Array]:
    return [jax.random.randint(key, (batch, length), 0, vocab) for key in keys(1)]


def images(batch: int, size: int = 16, classes: int = 10) -> list[dict[str, jax.Array]]:
    return [
        {"image": normal(key, batch, size, size, 3), "label": jax.random.randint(key, (batch,), 0, classes)}
        for key in keys(2)
    ]


def vectors(batch: int, features: int = 128, classes: int = 10) -> list[dict[str, jax.Array]]:
    return [
        {"x": normal(key, batch, features), "label": jax.random.randint(key, (batch,), 0, classes)} for key in keys(3)
    ]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def of_one_argument(step, state, batches, **how) -> Program:
    """The most common shape of a step: step(state, batch) -> (state, metrics)."""
    return Program(step, (state,), tuple((b,) for b in batches), batch_argnums=(1,), **how)


def supervised(module: nn.Module, tx: optax.GradientTransformation, batches, inputs="x", loss=cross_entropy) -> Program:
    """A Flax classifier in a TrainState."""
    params = jax.jit(module.init)(jax.random.key(0), batches[0][inputs])["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=tx)

    def step(state, batch):
        def loss_fn(params):
            return loss(state.apply_fn({"params": params}, batch[inputs]), batch["label"])

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return of_one_argument(step, state, batches)


# --- transformers ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    heads: int = 4
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        length, width = x.shape[1:]
        project = functools.partial(nn.Dense, width, use_bias=False, dtype=self.dtype)
        q, k, v = (project(name=n)(x).reshape(*x.shape[:2], self.heads, -1) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width / self.heads) ** 0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -1e9)).astype(self.dtype)
        return project(name="out")(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class Block(nn.Module):
    dropout: float = 0.1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        drop = nn.Dropout(self.dropout, deterministic=False)
        x = x + drop(Attention(dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + drop(nn.Dense(x.shape[-1], dtype=self.dtype)(hidden))


class Transformer(nn.Module):
    vocab: int = 256
    width: int = 64
    layers: int = 2
    dtype: Any = jnp.float32
    block: Any = Block

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = embed(tokens) + positions.astype(self.dtype)
        for _ in range(self.layers):
            x = self.block(dtype=self.dtype)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))  # the output layer is the embedding, tied


class DropoutState(TrainState):
    key: jax.Array


def language_model(module: nn.Module, batch: int) -> Program:
    batches = tokens(batch)
    params = jax.jit(module.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batches[0])["params"]
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 3e-3, warmup_steps=2, decay_steps=20)
    decays = jax.tree.map(lambda p: p.ndim > 1, params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, mask=decays))
    state = DropoutState.create(apply_fn=module.apply, params=params, tx=tx, key=jax.random.key(2))

    def step(state, tokens):
        dropout = jax.random.fold_in(state.key, state.step)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens, rngs={"dropout": dropout})
            return cross_entropy(logits[:, :-1], tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.global_norm(grads)}

    return of_one_argument(step, state, batches)


@entry
def transformer(batch: int = 8) -> Program:
    """Dropout from a key in the state, tied embedding, AdamW with schedule, decay mask and global-norm clipping."""
    return language_model(Transformer(), batch)


@entry
def transformer_bf16(batch: int = 8) -> Program:
    """Computes in bf16 on f32 weights."""
    return language_model(Transformer(dtype=jnp.bfloat16), batch)


@entry
def transformer_remat(batch: int = 8) -> Program:
    """Blocks are recomputed in the backward pass."""
    return language_model(Transformer(block=nn.remat(Block)), batch)


class StackedLayer(nn.Module):
    """One layer of a scanned stack; dropout-free, so that it can be a carry function."""

    @nn.compact
    def __call__(self, x, _):
        return Block(dropout=0.0)(x), None


class StackedTransformer(nn.Module):
    layers: int = 3

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(StackedLayer, {"params": 0}, split_rngs={"params": True}, length=self.layers)
        x = nn.Embed(256, 64)(x)
        return nn.Dense(256)(stack()(x, None)[0])


@entry
def transformer_scanned_layers(batch: int = 8) -> Program:
    """The layers are one scan over stacked weights."""
    batches = [{"x": t, "label": jnp.roll(t, -1, axis=1)} for t in tokens(batch)]
    return supervised(StackedTransformer(), optax.adam(1e-3), batches)


@entry
def vit(batch: int = 8) -> Program:
    """Images become patches by reshape and transpose; Flax's own attention; a class token."""

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, image):
            size, patch, width = image.shape[1], 4, 64
            x = image.reshape(-1, size // patch, patch, size // patch, patch, 3)
            x = x.transpose(0, 1, 3, 2, 4, 5).reshape(image.shape[0], -1, patch * patch * 3)
            x = nn.Dense(width)(x)
            token = self.param("token", nn.initializers.normal(0.02), (1, 1, width))
            x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, width)), x], axis=1)
            x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], width))
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(y, y)
            x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
            return nn.Dense(10)(nn.LayerNorm()(x)[:, 0])

    return supervised(ViT(), optax.adamw(1e-3), images(batch), inputs="image")


@entry
def moe(batch: int = 8) -> Program:
    """A mixture of experts with top-1 gates, dense dispatch and a load-balancing loss."""

    class MoE(nn.Module):
        experts: int = 4

        @nn.compact
        def __call__(self, x):
            width, init = x.shape[-1], nn.initializers.lecun_normal()
            gates = nn.softmax(nn.Dense(self.experts, use_bias=False)(x))
            chosen = jax.nn.one_hot(gates.argmax(-1), self.experts)
            up = self.param("up", init, (self.experts, width, 2 * width))
            down = self.param("down", init, (self.experts, 2 * width, width))
            dispatched = jnp.einsum("btd,bte->ebtd", x, chosen)
            outputs = jnp.einsum("ebth,ehd->ebtd", nn.relu(jnp.einsum("ebtd,edh->ebth", dispatched, up)), down)
            balance = self.experts * jnp.sum(gates.mean((0, 1)) * chosen.mean((0, 1)))
            return jnp.einsum("ebtd,bte->btd", outputs, gates * chosen), balance

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(256, 64)(tokens)
            y, balance = MoE()(nn.LayerNorm()(x))
            return nn.Dense(256)(x + y), balance

    def loss(outputs, labels):
        logits, balance = outputs
        return cross_entropy(logits, labels) + 0.01 * balance

    batches = [{"x": t, "label": jnp.roll(t, -1, axis=1)} for t in tokens(batch)]
    return supervised(Model(), optax.adam(1e-3), batches, loss=loss)


# --- convolutions ----------------------------------------------------------------------------------------------------


class BatchNormState(TrainState):
    batch_stats: Any


@entry
def resnet(batch: int = 8) -> Program:
    """Convolutions, BatchNorm over the global batch with running statistics in the state, momentum SGD."""

    class Residual(nn.Module):
        filters: int
        strides: int

        @nn.compact
        def __call__(self, x):
            norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
            conv = functools.partial(nn.Conv, use_bias=False)
            y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(x)))
            y = norm()(conv(self.filters, (3, 3))(y))
            return nn.relu(y + norm()(conv(self.filters, (1, 1), self.strides)(x)))

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, image):
            x = nn.Conv(32, (3, 3), use_bias=False)(image)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = Residual(64, 2)(Residual(32, 1)(x))
            return nn.Dense(10)(x.mean((1, 2)))

    module, batches = ResNet(), images(batch)
    variables = jax.jit(module.init)(jax.random.key(0), batches[0]["image"])
    state = BatchNormState.create(
        apply_fn=module.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.05, momentum=0.9, nesterov=True),
    )

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["label"]), (logits, updated["batch_stats"])

        (loss, (logits, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss, "accuracy": accuracy}

    return of_one_argument(step, state, batches)


@entry
def unet(batch: int = 8) -> Program:
    """Down by strided convolution, up by transposed convolution, the skip concatenated on channels; GroupNorm."""

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, image):
            skip = nn.silu(nn.GroupNorm(4)(nn.Conv(32, (3, 3), use_bias=False)(image)))
            deep = nn.silu(nn.Conv(64, (3, 3), strides=2)(skip))
            deep = nn.silu(nn.Conv(64, (3, 3))(nn.avg_pool(deep, (2, 2), (1, 1), "SAME")))
            up = nn.ConvTranspose(32, (2, 2), strides=(2, 2))(deep)
            return nn.Conv(3, (3, 3))(jnp.concatenate([up, skip], axis=-1))

    def loss(outputs, targets):
        return jnp.mean((outputs - targets) ** 2)

    batches = [{"x": b["image"], "label": jnp.flip(b["image"], axis=2)} for b in images(batch)]
    return supervised(UNet(), optax.adam(1e-3), batches, loss=loss)


# --- recurrence ------------------------------------------------------------------------------------------------------


@entry
def lstm(batch: int = 8) -> Program:
    """Flax's LSTM, a scan over time."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(256, 64)(tokens)
            return nn.Dense(256)(nn.RNN(nn.OptimizedLSTMCell(64))(x))

    batches = [{"x": t, "label": jnp.roll(t, -1, axis=1)} for t in tokens(batch)]
    return supervised(Model(), optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3)), batches)


@entry
def gru_time_major(batch: int = 8) -> Program:
    """A scan written by hand on (time, batch) data, whose outputs are flattened to (time * batch)."""
    width, vocab = 64, 256
    names = ("embed", "update", "reset", "candidate", "out")
    shapes = ((vocab, width), *[(2 * width, width)] * 3, (width, vocab))
    params = {n: dense_init(k, *s) for n, k, s in zip(names, keys(0, 5), shapes, strict=True)}
    tx = optax.adam(1e-3)

    def cell(params, hidden, x):
        both = jnp.concatenate([x, hidden], axis=-1)
        update, reset = jax.nn.sigmoid(both @ params["update"]), jax.nn.sigmoid(both @ params["reset"])
        candidate = jnp.tanh(jnp.concatenate([x, reset * hidden], axis=-1) @ params["candidate"])
        hidden = (1 - update) * hidden + update * candidate
        return hidden, hidden

    def loss_fn(params, tokens):
        tokens = tokens.T
        start = jnp.zeros((tokens.shape[1], width))
        _, hidden = lax.scan(functools.partial(cell, params), start, params["embed"][tokens[:-1]])
        logits = hidden.reshape(-1, width) @ params["out"]
        return cross_entropy(logits, tokens[1:].reshape(-1))

    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Program(step, (params, tx.init(params)), tuple((t,) for t in tokens(batch)), batch_argnums=(2,))


# --- generative models -----------------------------------------------------------------------------------------------


@entry
def vae(batch: int = 8) -> Program:
    """Reparameterised noise with the shape of the batch, from a key that is an argument of the step."""

    class VAE(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            hidden = nn.relu(nn.Dense(128)(x))
            mean, log_variance = nn.Dense(32)(hidden), nn.Dense(32)(hidden)
            latent = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
            return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(128)(latent))), mean, log_variance

    module, batches = VAE(), [b["x"] for b in vectors(batch)]
    params = jax.jit(module.init)(jax.random.key(0), batches[0], jax.random.key(1))["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))

    def step(state, x, key):
        def loss_fn(params):
            decoded, mean, log_variance = state.apply_fn({"params": params}, x, key)
            divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=-1)
            return jnp.mean(jnp.sum((decoded - x) ** 2, axis=-1) + divergence)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Program(step, (state,), tuple(zip(batches, keys(9), strict=True)), batch_argnums=(1,))


class GanState(NamedTuple):
    generator: Any
    discriminator: Any
    generator_opt: Any
    discriminator_opt: Any
    key: jax.Array  # an old-style uint32 key


@entry
def gan(batch: int = 8) -> Program:
    """Two networks with an optimizer each; the discriminator moves first, in the same step."""
    features, noise = 128, 64

    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z):
            return nn.Dense(features)(nn.leaky_relu(nn.Dense(128)(z)))

    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.leaky_relu(nn.Dense(128)(x)))[:, 0]

    generator, discriminator = Generator(), Discriminator()
    tx = optax.adam(1e-3, b1=0.5)
    bce = optax.sigmoid_binary_cross_entropy

    def step(state, real):
        key, subkey = jax.random.split(state.key)
        z = jax.random.normal(subkey, (real.shape[0], noise))

        def discriminate(params):
            fake = generator.apply(state.generator, z)
            on_real, on_fake = discriminator.apply(params, real), discriminator.apply(params, fake)
            return bce(on_real, jnp.ones_like(on_real)).mean() + bce(on_fake, jnp.zeros_like(on_fake)).mean()

        d_loss, grads = jax.value_and_grad(discriminate)(state.discriminator)
        updates, d_opt = tx.update(grads, state.discriminator_opt)
        d_params = optax.apply_updates(state.discriminator, updates)

        def generate(params):
            on_fake = discriminator.apply(d_params, generator.apply(params, z))
            return bce(on_fake, jnp.ones_like(on_fake)).mean()

        g_loss, grads = jax.value_and_grad(generate)(state.generator)
        updates, g_opt = tx.update(grads, state.generator_opt)
        g_params = optax.apply_updates(state.generator, updates)
        return GanState(g_params, d_params, g_opt, d_opt, key), {"loss": d_loss, "generator": g_loss}

    g_params = jax.jit(generator.init)(jax.random.key(0), jnp.zeros((1, noise)))
    d_params = jax.jit(discriminator.init)(jax.random.key(1), jnp.zeros((1, features)))
    state = GanState(g_params, d_params, tx.init(g_params), tx.init(d_params), jax.random.PRNGKey(2))
    return of_one_argument(step, state, [b["x"] for b in vectors(batch)])


# --- losses that look across the batch, or inside the example --------------------------------------------------------


@entry
def clip(batch: int = 8) -> Program:
    """Contrastive: every image against every text, both softmaxes, a learned temperature."""

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(64)(nn.gelu(nn.Dense(128)(x)))
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    image, text = Tower(), Tower()
    params = {
        "image": jax.jit(image.init)(jax.random.key(0), jnp.zeros((1, 128))),
        "text": jax.jit(text.init)(jax.random.key(1), jnp.zeros((1, 96))),
        "temperature": jnp.log(10.0),
    }
    tx = optax.adamw(1e-3)

    def loss_fn(params, batch):
        a, b = image.apply(params["image"], batch["image"]), text.apply(params["text"], batch["text"])
        logits = a @ b.T * jnp.exp(params["temperature"])
        labels = jnp.arange(logits.shape[0])
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    batches = tuple(({"image": normal(k, batch, 128), "text": normal(k, batch, 96)},) for k in keys(4))
    return Program(step, (params, tx.init(params)), batches, batch_argnums=(2,))


@entry
def siamese(batch: int = 8) -> Program:
    """Triplet loss; anchor, positive and negative are three arguments."""

    class Embedder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, use_bias=False)(jnp.tanh(nn.Dense(128)(x)))  # distances do not see a bias

    module = Embedder()
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 128)))
    tx = optax.sgd(0.01, momentum=0.9)

    def step(params, opt_state, anchor, positive, negative):
        def loss_fn(params):
            a, p, n = (module.apply(params, x) for x in (anchor, positive, negative))
            near, far = jnp.sum((a - p) ** 2, axis=-1), jnp.sum((a - n) ** 2, axis=-1)
            return jnp.maximum(near - far + 1.0, 0).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    batches = tuple(tuple(normal(k, batch, 128) for k in jax.random.split(key, 3)) for key in keys(5))
    return Program(step, (params, tx.init(params)), batches, batch_argnums=(2, 3, 4))


@entry
def masked_loss(batch: int = 8) -> Program:
    """sum(loss * mask) / sum(mask): the denominator is a sum over the global batch."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(256)(nn.relu(nn.Dense(128)(nn.Embed(256, 64)(tokens))))

    module = Model()
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return jnp.sum(losses * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "tokens": batch["mask"].sum().astype(jnp.int32)}

    def masked(tokens, key):
        lengths = jax.random.randint(key, (batch, 1), 1, 16)
        return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "mask": 1.0 * (jnp.arange(16) < lengths)}

    return of_one_argument(step, state, [masked(t, k) for t, k in zip(tokens(batch), keys(6), strict=True)])


@entry
def ranking(batch: int = 8) -> Program:
    """Ten candidates an example; the loss sorts their scores, the metric ranks them."""

    class Scorer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, use_bias=False)(nn.relu(nn.Dense(128)(nn.relu(nn.Dense(128)(x)))))[..., 0]

    def listwise(scores, relevance):
        order = jnp.argsort(-relevance, axis=-1)
        ranked = jnp.take_along_axis(scores, order, axis=-1)
        best_left = jax.nn.logsumexp(jnp.where(jnp.tri(10, dtype=bool).T, ranked[:, None, :], -jnp.inf), axis=-1)
        hardest = jnp.sort(scores, axis=-1)[:, -3:]
        return jnp.mean(best_left - ranked) + 0.01 * jnp.mean(hardest**2)

    batches = [{"x": normal(k, batch, 10, 64), "label": jax.random.uniform(k, (batch, 10))} for k in keys(7)]
    return supervised(Scorer(), optax.adam(1e-3), batches, loss=listwise)


@entry
def label_smoothing(batch: int = 8) -> Program:
    """Cross entropy on smoothed one-hot labels."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(128)(nn.relu(nn.Dense(128)(x)))))

    def loss(logits, labels):
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()

    return supervised(Model(), optax.adam(1e-3), vectors(batch), loss=loss)


@entry
def mixup(batch: int = 8) -> Program:
    """Each example is mixed with another one: the batch is permuted by a key."""
    params = mlp_params()
    tx = optax.sgd(0.05, momentum=0.9)

    def step(params, opt_state, batch, key):
        ways, share = jax.random.split(key)
        other = jax.random.permutation(ways, batch["x"].shape[0])
        weight = jax.random.beta(share, 2.0, 2.0)
        mixed = weight * batch["x"] + (1 - weight) * batch["x"][other]

        def loss_fn(params):
            logits = mlp(params, mixed)
            mine, theirs = cross_entropy(logits, batch["label"]), cross_entropy(logits, batch["label"][other])
            return weight * mine + (1 - weight) * theirs

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    batches = tuple(zip(vectors(batch), keys(8), strict=True))
    return Program(step, (params, tx.init(params)), batches, batch_argnums=(2,))


@entry
def recommender(batch: int = 8) -> Program:
    """Embedding tables, a bag of categories, dot interactions between all pairs of features, Adagrad."""
    sizes = {"user": 512, "item": 1024, "category": 128}
    width = 32

    class Model(nn.Module):
        @nn.compact
        def __call__(self, batch):
            user, item, category = (
                nn.Embed(size, width, embedding_init=nn.initializers.normal(0.3), name=name)(batch[name])
                for name, size in sizes.items()
            )
            dense = nn.relu(nn.Dense(width)(batch["dense"]))
            features = jnp.stack([user, item, category.mean(1), dense], axis=1)
            pairs = jnp.einsum("bid,bjd->bij", features, features)
            rows, columns = jnp.triu_indices(4, 1)
            top = jnp.concatenate([dense, pairs[:, rows, columns]], axis=-1)
            return nn.Dense(1)(nn.relu(nn.Dense(64)(top)))[:, 0]

    def sample(key):
        draw = jax.random.randint
        return {
            "user": draw(key, (batch,), 0, sizes["user"]),
            "item": draw(key, (batch,), 0, sizes["item"]),
            "category": draw(key, (batch, 5), 0, sizes["category"]),
            "dense": normal(key, batch, 16),
            "clicked": draw(key, (batch,), 0, 2).astype(jnp.float32),
        }

    module, batches = Model(), [sample(k) for k in keys(10)]
    params = jax.jit(module.init)(jax.random.key(0), batches[0])["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adagrad(0.05))

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch)
            return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return of_one_argument(step, state, batches)


# --- without a library, and with others ------------------------------------------------------------------------------


def mlp_params(sizes: tuple[int, ...] = (128, 128, 64, 10)) -> list[dict[str, jax.Array]]:
    layers = zip(sizes[:-1], sizes[1:], keys(0, len(sizes) - 1), strict=True)
    return [{"w": dense_init(k, i, o), "b": jnp.zeros(o)} for i, o, k in layers]


def mlp(params, x, activation=jax.nn.relu):
    for layer in params[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


@entry
def handwritten(batch: int = 8) -> Program:
    """jax.numpy only: momentum SGD by hand, the state a dict."""
    params = mlp_params()

    def step(state, batch):
        def loss_fn(params):
            log_probs = jax.nn.log_softmax(mlp(params, batch["x"]))
            return -jnp.mean(log_probs[jnp.arange(batch["x"].shape[0]), batch["label"]])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, state["params"], velocity)
        return {"params": params, "velocity": velocity}, loss

    return of_one_argument(step, {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}, vectors(batch))


@entry
def l2_regularised(batch: int = 8) -> Program:
    """The regulariser is a part of the loss that never sees the batch."""
    params, tx = mlp_params(), optax.adam(1e-3)

    def loss_fn(params, batch):
        penalty = sum(jnp.sum(layer["w"] ** 2) for layer in params)
        return cross_entropy(mlp(params, batch["x"]), batch["label"]) + 1e-3 * penalty

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return Program(step, (params, tx.init(params)), tuple((b,) for b in vectors(batch)), batch_argnums=(2,))


@entry
def equinox_mlp(batch: int = 8) -> Program:
    """The state is a module whose activation functions are leaves of its pytree."""
    model = eqx.nn.MLP(128, 10, width_size=128, depth=2, activation=jax.nn.relu, key=jax.random.key(0))
    tx = optax.adamw(1e-3)

    def step(model, opt_state, batch):
        @eqx.filter_value_and_grad
        def loss_fn(model):
            return cross_entropy(jax.vmap(model)(batch["x"]), batch["label"])

        loss, grads = loss_fn(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    batches = tuple((b,) for b in vectors(batch))
    return Program(step, (model, opt_state), batches, batch_argnums=(2,), jit=eqx.filter_jit)


class Scaled(eqx.Module):
    """Fields that are numbers: hyperparameters, a shape, and a rate inside a layer."""

    body: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    groups: int
    temperature: float

    def __call__(self, x, key):
        hidden = jax.nn.relu(self.body(x)).reshape(self.groups, -1)
        hidden = self.dropout(hidden / jnp.linalg.norm(hidden, axis=1, keepdims=True), key=key)
        return self.head(hidden.reshape(-1)) / self.temperature


@entry
def equinox_numbers(batch: int = 8) -> Program:
    """A module with floats and integers among its leaves, under `eqx.filter_jit`: none of them is trained."""
    body, head = (eqx.nn.Linear(128, n, key=key) for n, key in zip((128, 10), keys(0, 2), strict=True))
    model = Scaled(body, head, eqx.nn.Dropout(0.1), groups=4, temperature=0.5)
    tx = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model, opt_state, batch, key):
        @eqx.filter_value_and_grad
        def loss_fn(model):
            one_each = jax.random.split(key, batch["label"].shape[0])
            return cross_entropy(jax.vmap(model)(batch["x"], one_each), batch["label"])

        loss, grads = loss_fn(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    batches = tuple(zip(vectors(batch), keys(3), strict=True))
    return Program(step, (model, opt_state), batches, batch_argnums=(2,), jit=lambda step: step)


@entry
def haiku_mlp(batch: int = 8) -> Program:
    """Haiku with dropout; the step's key is an argument."""

    @hk.transform
    def forward(x):
        x = hk.dropout(hk.next_rng_key(), 0.1, hk.nets.MLP([128, 128], activate_final=True)(x))
        return hk.Linear(10)(x)

    batches, tx = vectors(batch), optax.lion(1e-4)
    params = jax.jit(forward.init)(jax.random.key(0), batches[0]["x"])

    def step(params, opt_state, key, batch):
        def loss_fn(params):
            return cross_entropy(forward.apply(params, key, batch["x"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    steps = tuple(zip(keys(11), batches, strict=True))
    return Program(step, (params, tx.init(params)), steps, batch_argnums=(3,))


# --- training techniques ---------------------------------------------------------------------------------------------


@entry
def per_example_clip(batch: int = 8) -> Program:
    """DP-SGD by hand: each example's gradient is clipped to norm 1, then summed, then noise is added."""
    params = mlp_params()

    def loss_fn(params, example):
        return cross_entropy(mlp(params, example["x"]), example["label"])

    def clipped(params, example):
        loss, grads = jax.value_and_grad(loss_fn)(params, example)
        scale = 1 / jnp.maximum(optax.global_norm(grads), 1.0)
        return loss, jax.tree.map(lambda g: g * scale, grads)

    def noise_like(key, tree):
        leaves, structure = jax.tree.flatten(tree)
        ways = jax.random.split(key, len(leaves))
        return structure.unflatten([jax.random.normal(k, x.shape) for k, x in zip(ways, leaves, strict=True)])

    def step(params, velocity, batch, key):
        losses, grads = jax.vmap(clipped, (None, 0))(params, batch)
        noisy = jax.tree.map(lambda g, z: (g.sum(0) + 0.1 * z) / losses.size, grads, noise_like(key, params))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, noisy)
        params = jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity)
        return params, velocity, {"loss": losses.mean()}

    velocity = jax.tree.map(jnp.zeros_like, params)
    return Program(step, (params, velocity), tuple(zip(vectors(batch), keys(12), strict=True)), batch_argnums=(2,))


@entry
def ema_and_masters(batch: int = 8) -> Program:
    """bf16 weights for the forward pass, f32 masters that the optimizer updates, an EMA copy for evaluation."""
    masters, tx = mlp_params(), optax.adam(1e-3)
    half = functools.partial(jax.tree.map, lambda p: p.astype(jnp.bfloat16))

    def step(state, batch):
        def loss_fn(weights):
            # a kink would make two right runs differ: bf16 rounds activations across it
            return cross_entropy(mlp(weights, batch["x"].astype(jnp.bfloat16), jnp.tanh), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["weights"])
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, state["opt"])
        masters = optax.apply_updates(state["masters"], updates)
        ema = optax.incremental_update(masters, state["ema"], 0.01)
        return {"weights": half(masters), "masters": masters, "ema": ema, "opt": opt_state}, {"loss": loss}

    ema = jax.tree.map(jnp.copy, masters)
    state = {"weights": half(masters), "masters": masters, "ema": ema, "opt": tx.init(masters)}
    return of_one_argument(step, state, vectors(batch))


@entry
def loss_scaling(batch: int = 8) -> Program:
    """float16 with a dynamic loss scale: a step whose gradients overflow is skipped."""
    params, tx = mlp_params(), optax.adam(1e-3)

    def step(state, batch):
        def loss_fn(params):
            low = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            loss = cross_entropy(mlp(low, batch["x"].astype(jnp.float16)), batch["label"])
            return loss * state["scale"], loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        kept = jax.tree.map(functools.partial(jnp.where, finite), new, {k: state[k] for k in new})
        scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
        return {**kept, "scale": scale}, {"loss": loss, "finite": finite}

    return of_one_argument(step, {"params": params, "opt": tx.init(params), "scale": jnp.float32(512)}, vectors(batch))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """A scale that looks at its children when it is rebuilt, as jmp.DynamicLossScale does."""

    value: jax.Array
    counter: jax.Array

    def __post_init__(self):
        assert self.value.ndim == 0 and self.counter.dtype == jnp.int32, "a scale is made of two scalars"

    def adjusted(self, finite) -> LossScale:
        grown = jnp.where(self.counter == 1, self.value * 2, self.value)
        return LossScale(jnp.where(finite, grown, self.value / 2), jnp.where(finite, (self.counter + 1) % 2, 0))


@entry
def loss_scale_object(batch: int = 8) -> Program:
    """The scale is a node of the state with checks of its own; gradients that overflow are skipped by a branch."""
    params, tx = mlp_params(), optax.adam(1e-3)

    def step(state, scale, batch):
        def loss_fn(params):
            return cross_entropy(mlp(params, batch["x"]), batch["label"]) * scale.value

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = jax.tree.map(lambda g: g / scale.value, grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))

        def apply(state):
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

        state = lax.cond(finite, apply, lambda state: state, state)
        return state, scale.adjusted(finite), loss / scale.value

    scale = LossScale(jnp.float32(512), jnp.int32(0))
    batches = tuple((b,) for b in vectors(batch))
    return Program(step, ({"params": params, "opt": tx.init(params)}, scale), batches, batch_argnums=(2,))


@entry
def sam(batch: int = 8) -> Program:
    """Sharpness-aware by hand: a second gradient at the weights moved against the first."""
    params, tx = mlp_params(), optax.sgd(0.05, momentum=0.9)

    def step(params, opt_state, batch):
        def loss_fn(params):
            return cross_entropy(mlp(params, batch["x"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        radius = 0.05 / (optax.global_norm(grads) + 1e-12)
        uphill = jax.tree.map(lambda p, g: p + radius * g, params, grads)
        updates, opt_state = tx.update(jax.grad(loss_fn)(uphill), opt_state)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return Program(step, (params, tx.init(params)), tuple((b,) for b in vectors(batch)), batch_argnums=(2,))


@entry
def custom_derivatives(batch: int = 8) -> Program:
    """One activation with a custom_vjp (straight-through), one with a custom_jvp, and jax.checkpoint by hand."""

    @jax.custom_vjp
    def quantised(x):
        return jnp.round(x * 8) / 8

    quantised.defvjp(lambda x: (quantised(x), x), lambda x, g: (g * (jnp.abs(x) < 1),))

    @jax.custom_jvp
    def softplus(x):
        return jnp.logaddexp(x, 0.0)

    softplus.defjvp(lambda primals, tangents: (softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]))

    params, tx = mlp_params(), optax.sgd(0.05, momentum=0.9)

    @jax.checkpoint
    def body(layer, x):
        return softplus(quantised(x @ layer["w"] + layer["b"]))

    def loss_fn(params, batch):
        hidden = functools.reduce(lambda x, layer: body(layer, x), params[:-1], batch["x"])
        return cross_entropy(mlp(params[-1:], hidden), batch["label"])

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return Program(step, (params, tx.init(params)), tuple((b,) for b in vectors(batch)), batch_argnums=(2,))


def classifier_loss(params, batch):
    return cross_entropy(mlp(params, batch["x"]), batch["label"])


@entry
def accumulation_loop(batch: int = 8) -> Program:
    """The batch is cut into two microbatches by a Python loop; one update from the mean of their gradients."""
    params, tx, parts = mlp_params(), optax.adam(1e-3), 2

    def step(params, opt_state, batch):
        micro = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        loss, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
        for i in range(parts):
            part = jax.tree.map(lambda x, i=i: x[i], micro)
            part_loss, part_grads = jax.value_and_grad(classifier_loss)(params, part)
            loss, grads = loss + part_loss / parts, jax.tree.map(lambda a, g: a + g / parts, grads, part_grads)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return Program(step, (params, tx.init(params)), tuple((b,) for b in vectors(batch)), batch_argnums=(2,))


def stacked(batch: int, count: int) -> tuple[tuple[Any, ...], ...]:
    """`count` batches stacked on a new leading dimension, for every step."""
    data = vectors(batch)
    rounds = [[data[(s + i) % STEPS] for i in range(count)] for s in range(STEPS)]
    return tuple((jax.tree.map(lambda *xs: jnp.stack(xs), *each),) for each in rounds)


@entry
def accumulation_scan(batch: int = 8) -> Program:
    """Microbatches come stacked, (2, batch, ...); a scan carries the sum of their gradients."""
    params, tx = mlp_params(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params, opt_state, batches):
        def accumulate(grads, batch):
            loss, more = jax.value_and_grad(classifier_loss)(params, batch)
            return jax.tree.map(jnp.add, grads, more), loss

        grads, losses = lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batches)
        updates, opt_state = tx.update(jax.tree.map(lambda g: g / losses.size, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": losses.mean()}

    return Program(step, (params, tx.init(params)), stacked(batch, 2), batch_argnums=(2,), batch_axis=1)


@entry
def steps_in_a_scan(batch: int = 8) -> Program:
    """Three whole training steps in one call: the scan carries weights and optimizer state."""
    params, tx = mlp_params(), optax.adam(1e-3)

    def train(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(classifier_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    def step(params, opt_state, batches):
        (params, opt_state), losses = lax.scan(train, (params, opt_state), batches)
        return params, opt_state, {"loss": losses[-1], "losses": losses}

    return Program(step, (params, tx.init(params)), stacked(batch, 3), batch_argnums=(2,), batch_axis=1)


@entry
def weight_norm(batch: int = 8) -> Program:
    """w = g v / |v| on one layer; on another, w / sigma with a power iteration whose vector is in the state."""
    k1, k2, k3, k4 = keys(0, 4)
    params = {
        "v": dense_init(k1, 128, 128),
        "g": jnp.ones(128),
        "spectral": dense_init(k2, 128, 64),
        "out": dense_init(k3, 64, 10),
    }
    tx = optax.sgd(0.05, momentum=0.9)

    def forward(params, left, x):
        v = params["v"]
        x = jax.nn.relu(x @ (params["g"] * v / jnp.linalg.norm(v, axis=0)))
        right = left @ params["spectral"]
        right = right / jnp.linalg.norm(right)
        left = params["spectral"] @ right
        left = left / jnp.linalg.norm(left)
        left, right = lax.stop_gradient((left, right))
        sigma = left @ params["spectral"] @ right
        return jax.nn.relu(x @ params["spectral"] / sigma) @ params["out"], left

    def step(state, batch):
        def loss_fn(params):
            logits, left = forward(params, state["left"], batch["x"])
            return cross_entropy(logits, batch["label"]), left

        (loss, left), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "left": left}, {"loss": loss}

    return of_one_argument(step, {"params": params, "opt": tx.init(params), "left": normal(k4, 128)}, vectors(batch))


@entry
def frozen_backbone(batch: int = 8) -> Program:
    """Only the head and a low-rank adapter learn; the backbone is returned as it came."""
    k1, k2, k3 = keys(13, 3)
    backbone = mlp_params((128, 256, 128))
    trained = {
        "down": dense_init(k1, 128, 32),
        "up": 0.1 * dense_init(k2, 32, 128),
        "head": dense_init(k3, 128, 10),
    }
    tx = optax.adamw(1e-3)

    def step(state, batch):
        def loss_fn(trained):
            features = lax.stop_gradient(mlp(state["backbone"], batch["x"]))
            return cross_entropy(
                (features + features @ trained["down"] @ trained["up"]) @ trained["head"], batch["label"]
            )

        loss, grads = jax.value_and_grad(loss_fn)(state["trained"])
        updates, opt = tx.update(grads, state["opt"], state["trained"])
        trained = optax.apply_updates(state["trained"], updates)
        return {"backbone": state["backbone"], "trained": trained, "opt": opt}, {"loss": loss}

    state = {"backbone": backbone, "trained": trained, "opt": tx.init(trained)}
    return of_one_argument(step, state, vectors(batch))


@entry
def counting_metrics(batch: int = 8) -> Program:
    """Accuracy by argmax, a confusion matrix of integers and the best loss so far, all carried in the state."""
    params, tx = mlp_params(), optax.nadam(1e-3)

    def step(state, batch):
        def loss_fn(params):
            logits = mlp(params, batch["x"])
            return cross_entropy(logits, batch["label"]), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        guesses = logits.argmax(-1)
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "seen": state["seen"] + guesses.size,
            "right": state["right"] + jnp.sum(guesses == batch["label"]),
            "confusion": state["confusion"].at[batch["label"], guesses].add(1),
            "best": jnp.minimum(state["best"], loss),
        }
        top3 = jnp.any(lax.top_k(logits, 3)[1] == batch["label"][:, None], axis=-1).mean()
        return new, {"loss": loss, "accuracy": new["right"] / new["seen"], "top3": top3}

    state = {
        "params": params,
        "opt": tx.init(params),
        "seen": jnp.int32(0),
        "right": jnp.int32(0),
        "confusion": jnp.zeros((10, 10), jnp.int32),
        "best": jnp.float32(jnp.inf),
    }
    return of_one_argument(step, state, vectors(batch))


# --- batches that are not one array with examples first ---------------------------------------------------------------


def momentum_step(state, loss_fn):
    """SGD with momentum by hand."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - 0.02 * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}, loss


def momentum_state(params):
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


@entry
def distillation(batch: int = 8) -> Program:
    """The teacher's weights are an argument that does not come back."""

    def step(state, teacher, batch):
        def loss_fn(params):
            logits, wanted = mlp(params, batch["x"]), jax.nn.softmax(mlp(teacher, batch["x"]))
            return cross_entropy(logits, batch["label"]) - jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(logits), -1))

        return momentum_step(state, loss_fn)

    teacher = jax.tree.map(lambda p: p * 1.5, mlp_params((128, 256, 10)))
    batches = tuple((teacher, b) for b in vectors(batch))
    return Program(step, (momentum_state(mlp_params()),), batches, batch_argnums=(2,))


@entry
def generator_step(batch: int = 8) -> Program:
    """Half of a GAN: the discriminator is frozen, and the examples are drawn inside."""

    def step(state, discriminator, key):
        noise = jax.random.normal(key, (batch, 64))
        return momentum_step(
            state, lambda params: -jnp.mean(jax.nn.log_sigmoid(mlp(discriminator, mlp(params, noise, jnp.tanh))))
        )

    batches = tuple((mlp_params((128, 64, 1)), key) for key in keys(5))
    return Program(step, (momentum_state(mlp_params((64, 128, 128))),), batches, batch_argnums=())


@entry
def dcgan(batch: int = 8) -> Program:
    """The generator's half of a DCGAN: the frozen discriminator is convolutions and normalizes over the batch."""
    k1, k2, k3, k4 = keys(0, 4)
    params = {"seed": dense_init(k1, 32, 4 * 4 * 32), "up": normal(k2, 4, 4, 32, 1) / 8}
    frozen = {"down": normal(k3, 4, 4, 1, 16) / 4, "out": dense_init(k4, 4 * 4 * 16, 1)}
    layout = ("NHWC", "HWIO", "NHWC")

    def generate(params, noise):
        small = jax.nn.relu((noise @ params["seed"]).reshape(-1, 4, 4, 32))
        return jnp.tanh(lax.conv_transpose(small, params["up"], (2, 2), "SAME", dimension_numbers=layout))

    def judge(frozen, image):
        hidden = lax.conv_general_dilated(image, frozen["down"], (2, 2), "SAME", dimension_numbers=layout)
        hidden = (hidden - hidden.mean((0, 1, 2))) * lax.rsqrt(hidden.var((0, 1, 2)) + 1e-3)
        return jax.nn.leaky_relu(hidden).reshape(len(image), -1) @ frozen["out"]

    def step(state, discriminator, noise):
        return momentum_step(
            state, lambda params: -jnp.mean(jax.nn.log_sigmoid(judge(discriminator, generate(params, noise))))
        )

    batches = tuple((frozen, normal(key, batch, 32)) for key in keys(4))
    return Program(step, (momentum_state(params),), batches, batch_argnums=(2,))


@entry
def graph_network(batch: int = 8) -> Program:
    """Nodes, edges and graphs in one argument, each with a leading size of its own."""
    width, nodes, edges = 64, 12 * batch, 40 * batch
    shapes = {"encode": (32, width), "message": (width, width), "update": (2 * width, width), "read": (width, 8)}
    params = {n: dense_init(k, *s) for (n, s), k in zip(shapes.items(), keys(0, 4), strict=True)}

    def step(state, graph):
        def loss_fn(params):
            hidden = jnp.tanh(graph["nodes"] @ params["encode"])
            sent = jnp.tanh(hidden[graph["source"]] @ params["message"]) * graph["weight"][:, None]
            received = jax.ops.segment_sum(sent, graph["target"], hidden.shape[0])
            hidden = jnp.tanh(jnp.concatenate([hidden, received], -1) @ params["update"])
            pooled = jax.ops.segment_sum(hidden, graph["member"], graph["wanted"].shape[0])
            return jnp.mean((pooled @ params["read"] - graph["wanted"]) ** 2)

        return momentum_step(state, loss_fn)

    def graph(key):
        return {
            "nodes": normal(key, nodes, 32),
            "weight": jax.random.uniform(key, (edges,)),
            "source": jax.random.randint(key, (edges,), 0, nodes),
            "target": jax.random.randint(jax.random.fold_in(key, 1), (edges,), 0, nodes),
            "member": jnp.arange(nodes) // 12,
            "wanted": normal(key, batch, 8),
        }

    return of_one_argument(step, momentum_state(params), [graph(key) for key in keys(6)])


@entry
def rnn_time_major(batch: int = 8) -> Program:
    """`[T, B, F]` comes in, `[B]` lengths beside it."""
    shapes = {"x": (32, 64), "h": (64, 64), "out": (64, 64)}
    params = {n: dense_init(k, *s) for (n, s), k in zip(shapes.items(), keys(0, 3), strict=True)}

    def step(state, x, wanted):
        def loss_fn(params):
            def cell(h, x):
                h = jnp.tanh(x @ params["x"] + h @ params["h"])
                return h, h @ params["out"]

            _, outputs = lax.scan(cell, jnp.zeros((x.shape[1], 64)), x)
            return jnp.mean((outputs - wanted) ** 2)

        return momentum_step(state, loss_fn)

    batches = tuple((normal(key, 6, batch, 32), normal(key, 6, batch, 64)) for key in keys(7))
    return Program(step, (momentum_state(params),), batches, batch_argnums=(1, 2), batch_axis=1)


@entry
def accumulation_slices(batch: int = 8) -> Program:
    """As T5X accumulates: a loop slices its microbatch out of the batch."""

    def step(state, batch):
        size = batch["x"].shape[0] // 2

        def add(i, sums):
            part = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * size, size), batch)
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(classifier_loss)(state["params"], part))

        loss, grads = lax.fori_loop(0, 2, add, (0.0, jax.tree.map(jnp.zeros_like, state["params"])))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g / 2, state["velocity"], grads)
        params = jax.tree.map(lambda p, v: p - 0.02 * v, state["params"], velocity)
        return {"params": params, "velocity": velocity}, loss / 2

    return of_one_argument(step, momentum_state(mlp_params()), vectors(batch))


@entry
def ppo(batch: int = 8) -> Program:
    """Epochs of shuffled minibatches over one rollout, `[T, environments]`."""
    params = {"body": mlp_params((128, 64)), "policy": mlp_params((64, 4)), "value": mlp_params((64, 1))}

    def loss_fn(params, part):
        hidden = jnp.tanh(mlp(params["body"], part["seen"]))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(mlp(params["policy"], hidden)), part["action"][:, None], 1)[
            :, 0
        ]
        gain = (part["gain"] - part["gain"].mean()) / (part["gain"].std() + 1e-3)
        ratio = jnp.exp(chosen - part["before"])
        policy = -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain))
        return policy + jnp.mean((mlp(params["value"], hidden)[:, 0] - part["return"]) ** 2)

    def step(state, rollout, key):
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rollout)
        count = flat["gain"].shape[0]

        def minibatch(state, part):
            return momentum_step(state, lambda params: loss_fn(params, part))

        def epoch(state, key):
            order = jax.random.permutation(key, count)
            parts = jax.tree.map(lambda a: a[order].reshape(2, count // 2, *a.shape[1:]), flat)
            return lax.scan(minibatch, state, parts)

        state, losses = lax.scan(epoch, state, jax.random.split(key, 2))
        return state, losses.mean()

    def rollout(key):
        shape = 4, batch
        names = zip(("gain", "return", "before"), jax.random.split(key, 3), strict=True)
        action = jax.random.randint(key, shape, 0, 4)
        return {"seen": normal(key, *shape, 128), "action": action, **{n: normal(k, *shape) for n, k in names}}

    batches = tuple((rollout(key), key) for key in keys(8))
    return Program(step, (momentum_state(params),), batches, batch_argnums=(1,), batch_axis=1)
