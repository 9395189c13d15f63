"""The optimizers of the suite, and the same on shards as an expert writes them.

Most optimizers are elementwise: on a shard they run as they are. What takes norms must add them up over the replicas.
Adafactor keeps row and column means of whole matrices; nobody writes that on shards by hand in an afternoon, so there
is no expert's version of it. Muon and Shampoo work on whole matrices: those of the layers; the rest (embeddings, norms)
is AdamW's. The expert gives every replica whole matrices of its own (`owned` in variants.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import matrix_zoo
import optax
import optax.contrib

Transformation = optax.GradientTransformation
Split = Sequence[bool]  # for each weight: does a replica hold only a part of it?


@dataclass(frozen=True)
class Optimizer:
    plain: Callable[[], Transformation]
    on_shards: Callable[[Split, str], Transformation] | None  # (which weights are split, the axis)


def elementwise(make: Callable[[], Transformation]) -> Optimizer:
    return Optimizer(make, lambda split, axis: make())


def squares(tree: optax.Updates, split: Split, axis: str) -> list[jax.Array]:
    """The sum of squares of every leaf, over all replicas; one message for all leaves."""
    own = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]
    parts = jax.lax.psum(jnp.stack(own), axis)
    return [parts[i] if is_split else own[i] for i, is_split in enumerate(split)]


def clip_shards(limit: float, split: Split, axis: str) -> Transformation:
    """`optax.clip_by_global_norm`."""

    def update(updates, state, params=None):
        norm = jnp.sqrt(sum(squares(updates, split, axis)))
        keep = norm < limit
        return jax.tree.map(lambda g: jnp.where(keep, g, (g / norm) * limit), updates), state

    return Transformation(lambda params: optax.EmptyState(), update)


def trust_shards(split: Split, axis: str) -> Transformation:
    """`optax.scale_by_trust_ratio`: each weight's own norm against that of its update."""

    def update(updates, state, params):
        leaves, tree = jax.tree.flatten(updates)
        norms = squares([*leaves, *jax.tree.leaves(params)], [*split, *split], axis)
        of_update, of_weight = jnp.sqrt(jnp.stack(norms)).reshape(2, -1)
        either = (of_update == 0) | (of_weight == 0)
        ratios = jnp.where(either, 1.0, of_weight / jnp.where(either, 1.0, of_update))
        return tree.unflatten([g * ratios[i] for i, g in enumerate(leaves)]), state

    return Transformation(lambda params: optax.EmptyState(), update)


RATE = 1e-3

# For one matrix: what an expert applies to those that a replica owns.
MATRIX_OPTIMIZERS: dict[str, Callable[[], Transformation]] = {
    "muon": lambda: optax.contrib.muon(RATE),
    "shampoo": lambda: matrix_zoo.transformation("shampoo_eigh", RATE),
}


def of_matrices(params: optax.Params) -> list[bool]:
    """Which weights are matrices of layers."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return ["layers" in jax.tree_util.keystr(path) and leaf.ndim == 2 for path, leaf in leaves]


def _matrices_and_rest(name: str) -> Transformation:
    def labels(params: optax.Params) -> optax.Params:
        return jax.tree.unflatten(
            jax.tree.structure(params), [name if matrix else "rest" for matrix in of_matrices(params)]
        )

    return optax.multi_transform({name: MATRIX_OPTIMIZERS[name](), "rest": optax.adamw(RATE)}, labels)


OPTIMIZERS = {
    "sgd": elementwise(lambda: optax.sgd(RATE)),
    "momentum": elementwise(lambda: optax.sgd(RATE, momentum=0.9)),
    "adam": elementwise(lambda: optax.adam(RATE)),
    "adamw+clip": Optimizer(
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
        lambda split, axis: optax.chain(clip_shards(1.0, split, axis), optax.adamw(RATE)),
    ),
    "lamb": Optimizer(
        lambda: optax.lamb(RATE, weight_decay=0.01),
        lambda split, axis: optax.chain(
            optax.scale_by_adam(eps=1e-6),
            optax.add_decayed_weights(0.01),
            trust_shards(split, axis),
            optax.scale_by_learning_rate(RATE),
        ),
    ),
    "adafactor": Optimizer(lambda: optax.adafactor(RATE), None),
    **{name: Optimizer(functools.partial(_matrices_and_rest, name), None) for name in MATRIX_OPTIMIZERS},
}
