"""Every optimizer that Optax has, as a training step: `optimizer_step(name)` gives a program to shard.

    step, params, opt_state, batches = optimizer_step("adamw")
    for batch in batches:                                   # batch = (inputs, targets)
        params, opt_state, loss = step(params, opt_state, batch)

`OPTIMIZERS[name]` is a zero-argument factory of the transformation; its `elementwise` says that (all but a sliver
of) the state is one number per weight, as with Adam, so that sharding must reach it; its `update` hides what some
optimizers need beyond `update(grads, state, params)`. No shardstep in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

INPUTS, HIDDEN, OUTPUTS = 128, 256, 64


# --- the model -------------------------------------------------------------------------------------------------------


def init_params(seed: int = 0) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {
            "kernel": jax.random.normal(first, (INPUTS, HIDDEN)) / INPUTS**0.5,
            "bias": jnp.zeros(HIDDEN),
        },
        "out": {
            "kernel": jax.random.normal(second, (HIDDEN, OUTPUTS)) / HIDDEN**0.5,
            "bias": jnp.zeros(OUTPUTS),
        },
    }


def loss_fn(params: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    predictions = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    return jnp.mean((predictions - targets) ** 2)


def make_batches(size: int, steps: int, seed: int = 1) -> list[tuple[jax.Array, jax.Array]]:
    """Targets that a linear map could give: something to learn."""
    keys = jax.random.split(jax.random.key(seed), steps + 1)
    teacher = jax.random.normal(keys[0], (INPUTS, OUTPUTS)) / INPUTS**0.5
    inputs = [jax.random.normal(key, (size, INPUTS)) for key in keys[1:]]
    return [(x, x @ teacher) for x in inputs]


# --- what an optimizer is told besides the gradients -----------------------------------------------------------------

Update = Callable[..., tuple[Any, Any, jax.Array]]  # (tx, params, state, batch) -> params, state, loss


def plain(tx, params, state, batch, **told):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params, **told)
    return optax.apply_updates(params, updates), state, loss


def told_value(tx, params, state, batch):
    """Polyak steps and plateaus look at the loss itself."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state, loss


def searching_a_line(tx, params, state, batch):
    """The optimizer evaluates the loss elsewhere, in a while loop."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    told = {"value": loss, "grad": grads, "value_fn": lambda p: loss_fn(p, batch)}
    updates, state = tx.update(grads, state, params, **told)
    return optax.apply_updates(params, updates), state, loss


def told_objective(tx, params, state, batch):
    """Sophia takes Hessian-vector products of the loss."""
    return plain(tx, params, state, batch, obj_fn=lambda p: loss_fn(p, batch))


def told_gradient(tx, params, state, batch):
    """Opaque SAM takes a second gradient at the adversarial weights."""
    return plain(tx, params, state, batch, grad_fn=lambda p, _: jax.grad(loss_fn)(p, batch))


def on_fast_and_slow(tx, params, state, batch):
    """Lookahead carries two copies of the weights and trains the fast one."""
    loss, grads = jax.value_and_grad(loss_fn)(params.fast, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def per_example(tx, params, state, batch):
    """Differential privacy clips the gradient of every example."""
    losses, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0))(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, losses.mean()


# --- the optimizers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizer:
    make: Callable[[], optax.GradientTransformation]
    elementwise: bool = True
    update: Update = plain
    wrap: Callable[[Any], Any] = lambda params: params  # how the weights travel

    def __call__(self) -> optax.GradientTransformation:
        return self.make()


def stateless(make, **how) -> Optimizer:
    """Nothing, or a few scalars, to shard."""
    return Optimizer(make, elementwise=False, **how)


def factored(make, **how) -> Optimizer:
    """State that is smaller than the weights: rows and columns, projections, a number per layer."""
    return Optimizer(make, elementwise=False, **how)


def warmup_cosine() -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(1e-4, 1e-2, warmup_steps=2, decay_steps=20)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def freeze_biases():
    return jax.tree.map(lambda p: p.ndim == 1, init_params())


def kernel_squares(params):
    return jax.tree.map(lambda p: jnp.sum(p * p), params)


ALIASES = {
    "adabelief": Optimizer(lambda: optax.adabelief(1e-3)),
    "adadelta": Optimizer(lambda: optax.adadelta(1.0)),
    "adafactor": factored(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32)),
    "adafactor_momentum": Optimizer(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=1024, momentum=0.9)),
    "adagrad": Optimizer(lambda: optax.adagrad(1e-2)),
    "adam": Optimizer(lambda: optax.adam(1e-3)),
    "adam_bf16_momentum": Optimizer(lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16)),
    "adam_nesterov": Optimizer(lambda: optax.adam(1e-3, nesterov=True)),
    "adamax": Optimizer(lambda: optax.adamax(1e-3)),
    "adamaxw": Optimizer(lambda: optax.adamaxw(1e-3)),
    "adamw": Optimizer(lambda: optax.adamw(1e-3)),
    "adamw_masked_decay": Optimizer(lambda: optax.adamw(warmup_cosine(), weight_decay=0.1, mask=is_matrix)),
    "adan": Optimizer(lambda: optax.adan(1e-3)),
    "amsgrad": Optimizer(lambda: optax.amsgrad(1e-3)),
    "fromage": stateless(lambda: optax.fromage(1e-2)),
    "lamb": Optimizer(lambda: optax.lamb(1e-3, weight_decay=0.01)),
    "lars": Optimizer(lambda: optax.lars(1e-2, weight_decay=0.01)),
    "lbfgs": Optimizer(lambda: optax.lbfgs(memory_size=3), update=searching_a_line),
    "lion": Optimizer(lambda: optax.lion(1e-4)),
    "nadam": Optimizer(lambda: optax.nadam(1e-3)),
    "nadamw": Optimizer(lambda: optax.nadamw(1e-3)),
    "noisy_sgd": stateless(lambda: optax.noisy_sgd(1e-2, key=jax.random.key(3))),
    "novograd": Optimizer(lambda: optax.novograd(1e-3)),
    "optimistic_adam": Optimizer(lambda: optax.optimistic_adam(1e-3)),
    "optimistic_adam_v2": Optimizer(lambda: optax.optimistic_adam_v2(1e-3)),
    "optimistic_gradient_descent": Optimizer(lambda: optax.optimistic_gradient_descent(1e-2)),
    "polyak_sgd": stateless(lambda: optax.polyak_sgd(max_learning_rate=0.1), update=told_value),
    "radam": Optimizer(lambda: optax.radam(1e-3)),
    "rmsprop": Optimizer(lambda: optax.rmsprop(1e-3)),
    "rmsprop_centered": Optimizer(lambda: optax.rmsprop(1e-3, centered=True, momentum=0.9)),
    "rprop": Optimizer(lambda: optax.rprop(1e-3)),
    "sgd": stateless(lambda: optax.sgd(1e-2)),
    "sgd_momentum": Optimizer(lambda: optax.sgd(1e-2, momentum=0.9)),
    "sgd_nesterov": Optimizer(lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "sign_sgd": stateless(lambda: optax.sign_sgd(1e-4)),
    "signum": Optimizer(lambda: optax.signum(1e-4)),
    "sm3": Optimizer(lambda: optax.sm3(1e-2)),
    "yogi": Optimizer(lambda: optax.yogi(1e-3)),
}

# The learning-rate-free ones start at 1e-6 by default, where the distance travelled is lost in rounding: start higher.
CONTRIB = {
    "acprop": Optimizer(lambda: contrib.acprop(1e-3)),
    "ademamix": Optimizer(lambda: contrib.ademamix(1e-3)),
    "adopt": Optimizer(lambda: contrib.adopt(1e-3)),
    "cocob": Optimizer(lambda: contrib.cocob()),
    "dadapt_adamw": Optimizer(lambda: contrib.dadapt_adamw()),
    "dog": Optimizer(lambda: contrib.dog(init_step=("distance", 0.1))),
    "dowg": Optimizer(lambda: contrib.dowg()),
    "dpsgd": stateless(lambda: contrib.dpsgd(1e-2, 1.0, 0.1, seed=3), update=per_example),
    "galore": factored(lambda: contrib.galore(1e-3, rank=8, update_proj_gap=2)),
    "madgrad": Optimizer(lambda: contrib.madgrad(1e-3)),
    "mechanize": Optimizer(lambda: contrib.mechanize(optax.adam(1e-3))),
    "momo": Optimizer(lambda: contrib.momo(), update=told_value),
    "momo_adam": Optimizer(lambda: contrib.momo_adam(), update=told_value),
    "muon": Optimizer(lambda: contrib.muon(1e-3)),
    "normalized_sgd": stateless(lambda: optax.chain(contrib.normalize(), optax.sgd(1e-2))),
    "prodigy": Optimizer(lambda: contrib.prodigy(estim_lr0=1e-3)),
    "reduce_on_plateau": Optimizer(
        lambda: optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau(patience=1)), update=told_value
    ),
    "sam": Optimizer(lambda: contrib.sam(optax.adam(1e-3), optax.chain(contrib.normalize(), optax.sgd(0.05)))),
    "sam_opaque": Optimizer(
        lambda: contrib.sam(optax.adam(1e-3), optax.sgd(0.05), opaque_mode=True), update=told_gradient
    ),
    "schedule_free": Optimizer(lambda: contrib.schedule_free(optax.adam(1e-3, b1=0.0), 1e-3)),
    "schedule_free_adamw": Optimizer(lambda: contrib.schedule_free_adamw(1e-3)),
    "schedule_free_sgd": Optimizer(lambda: contrib.schedule_free_sgd(1e-2)),
    "simplified_ademamix": Optimizer(lambda: contrib.simplified_ademamix(1e-4)),
    "sophia": Optimizer(lambda: contrib.sophia(1e-4, update_interval=2), update=told_objective),
    "split_real_and_imaginary": Optimizer(lambda: contrib.split_real_and_imaginary(optax.adam(1e-3))),
}

WRAPPERS = {
    "adaptive_grad_clip": Optimizer(lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-3))),
    "apply_every": Optimizer(lambda: optax.chain(optax.adam(1e-3), optax.apply_every(2))),
    "apply_if_finite": Optimizer(lambda: optax.apply_if_finite(optax.adam(1e-3), 3)),
    "backtracking": stateless(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)), update=searching_a_line
    ),
    "centralize": Optimizer(lambda: optax.chain(optax.centralize(), optax.adam(1e-3))),
    "chain_of_clips": Optimizer(
        lambda: optax.chain(
            optax.zero_nans(),
            optax.clip(0.5),
            optax.clip_by_block_rms(1.0),
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(),
            optax.add_decayed_weights(0.01, mask=is_matrix),
            optax.scale_by_schedule(warmup_cosine()),
            optax.ema(0.9),
            optax.scale(-1.0),
        )
    ),
    "conditionally_mask": Optimizer(lambda: optax.conditionally_mask(optax.adam(1e-3), lambda step: step % 2 == 0)),
    "conditionally_transform": Optimizer(
        lambda: optax.conditionally_transform(optax.adam(1e-3), lambda step: step % 2 == 0)
    ),
    "flatten": Optimizer(lambda: optax.flatten(optax.adam(1e-3))),
    "freeze": Optimizer(lambda: optax.chain(optax.adam(1e-3), optax.freeze(freeze_biases()))),
    "freeze_biases": Optimizer(lambda: optax.selective_transform(optax.adam(1e-3), freeze_mask=freeze_biases())),
    "inject_hyperparams": Optimizer(lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=warmup_cosine())),
    "keep_params_nonnegative": Optimizer(lambda: optax.chain(optax.adam(1e-3), optax.keep_params_nonnegative())),
    "lookahead": Optimizer(
        lambda: optax.lookahead(optax.adam(1e-3), sync_period=2, slow_step_size=0.5),
        update=on_fast_and_slow,
        wrap=optax.LookaheadParams.init_synced,
    ),
    "masked": Optimizer(lambda: optax.masked(optax.adam(1e-3), is_matrix)),
    "measure_with_ema": Optimizer(lambda: optax.chain(optax.measure_with_ema(kernel_squares, 0.9), optax.adam(1e-3))),
    "multi_steps": Optimizer(lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()),
    "multi_transform": Optimizer(
        lambda: optax.multi_transform({"matrix": optax.adam(1e-3), "vector": optax.sgd(1e-2)}, labels)
    ),
    "named_chain": Optimizer(
        lambda: optax.named_chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.adam(1e-3)))
    ),
    "noise_then_adam": Optimizer(
        lambda: optax.chain(optax.add_noise(0.01, 0.55, key=jax.random.key(3)), optax.adam(1e-3))
    ),
    "normalize_by_update_norm": stateless(lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(1e-2))),
    "rss": Optimizer(lambda: optax.chain(optax.scale_by_rss(), optax.sgd(1e-2))),
    "scale_by_distance_over_gradients": Optimizer(
        lambda: optax.chain(optax.scale_by_distance_over_gradients(reps_rel=1e-2), optax.scale(-1.0))
    ),
    "scale_by_param_block": stateless(
        lambda: optax.chain(optax.scale_by_param_block_norm(), optax.scale_by_param_block_rms(), optax.sgd(1e-2))
    ),
    "snapshot": Optimizer(lambda: optax.chain(optax.adam(1e-3), optax.snapshot("squares", kernel_squares))),
    "stateless_rescaling": Optimizer(
        lambda: optax.chain(optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p), optax.adam(1e-3))
    ),
    "trust_ratio": Optimizer(
        lambda: optax.chain(optax.trace(0.9), optax.scale_by_trust_ratio(), optax.scale_by_learning_rate(1e-2))
    ),
}

OPTIMIZERS: dict[str, Optimizer] = ALIASES | CONTRIB | WRAPPERS


def optimizer_step(name: str, batch: int = 8, steps: int = 3):
    """(step, params, opt_state, batches) of a two-layer perceptron trained with this optimizer."""
    entry = OPTIMIZERS[name]
    tx = entry()
    params = entry.wrap(init_params())

    def step(params, opt_state, batch):
        return entry.update(tx, params, opt_state, batch)

    return step, params, tx.init(params), make_batches(batch, steps)
