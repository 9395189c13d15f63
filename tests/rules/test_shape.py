"""Shape rules: where a split lands, and that nothing is lost on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from simulate import check_decision, verify

from shardstep._src.core import compat
from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Split
from shardstep._src.rules import Site, rule_for

R, S, P = REPLICATED, Split, PARTIAL


def values(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).integers(-9, 10, shape), dtype)


def answer(fun, *args, placements, n=2, wants=(), at=0):
    """What the rule of one equation answers to given placements, checked by simulation."""
    eqn = jax.make_jaxpr(fun)(*args).eqns[at]
    arrays = [Array(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    outs = [Array(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    site = Site(eqn.primitive, eqn.params, tuple(arrays), tuple(outs), n, wants)
    decisions = rule_for(eqn.primitive)(site, placements)
    if decisions is None:
        return None
    decisions = [decisions] if hasattr(decisions, "operands") else list(decisions)
    expected = eqn.primitive.bind(*args, **eqn.params)
    expected = expected if eqn.primitive.multiple_results else [expected]
    for decision in decisions:
        check_decision(eqn, site, decision, args, expected, np.random.default_rng(1), n)
    return [(d.operands, d.results) for d in decisions]


# ------------------------------------------------------ reshape -------------------------------------------------------

RESHAPES = [
    # old, split, new, where it lands, with n = 2
    ((6, 4), S(0), (24,), S(0)),
    ((6, 4), S(1), (24,), S(0, outer=6)),
    ((24,), S(0, outer=6), (6, 4), S(1)),
    ((24,), S(0), (6, 4), S(0)),
    ((24,), S(0), (3, 8), None),  # blocks of 12 are not whole rows of 8
    ((24,), S(0, outer=3), (6, 4), S(0, outer=3)),
    ((24,), S(0, outer=3), (3, 8), S(1)),
    ((24,), S(0, outer=3), (3, 4, 2), S(1)),
    ((24,), S(0, outer=6), (3, 8), S(1, outer=2)),
    ((3, 8), S(1, outer=2), (6, 4), S(1)),
    ((3, 8), S(1, outer=2), (3, 2, 4), S(2)),
    ((2, 4, 3, 5), S(1), (8, 15), S(0, outer=2)),
    ((2, 4, 3, 5), S(0), (8, 15), S(0)),
    ((8, 15), S(0, outer=2), (2, 4, 3, 5), S(1)),
    ((4, 6), S(0), (1, 4, 1, 6, 1), S(1)),
    ((1, 4, 1, 6, 1), S(1), (4, 6), S(0)),
    ((1, 4, 1, 6, 1), S(3), (6, 1, 4), None),  # rows of 6 end inside the rows of 4
    ((4, 6), S(0), (4, 3, 2), S(0)),
    ((4, 6), S(1), (4, 6, 1), S(1)),
    ((4, 6), S(1), (4, 3, 2), None),  # 2 replicas hold one and a half rows of 3
    ((4, 1), S(0), (4,), S(0)),
    ((4, 6), S(0), (2, 12), S(0)),
    ((4, 6), S(0), (8, 3), S(0)),
]


@pytest.mark.parametrize(("old", "split", "new", "lands"), RESHAPES)
def test_reshape_carries_the_split(old, split, new, lands):
    got = answer(lambda x: lax.reshape(x, new), values(*old), placements=(split,))
    assert got == (None if lands is None else [((split,), (lands,))])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((6, 12), (72,)),
        ((72,), (2, 3, 12)),
        ((2, 6, 6), (12, 2, 3)),
        ((12, 6), (1, 6, 2, 6)),
        ((1, 6), (6,)),
        ((6,), (6, 1)),
    ],
)
def test_reshape_is_right_wherever_it_answers(old, new, n):
    verify(lambda x: lax.reshape(x, new), values(*old), n=n, outers=(1, 2, 6))


def test_reshape_of_nothing():
    assert answer(lambda x: lax.reshape(x, (0,)), values(4, 0), placements=(S(0),)) is None
    assert answer(lambda x: lax.reshape(x, (0,)), values(4, 0), placements=(R,)) == [((R,), (R,))]


def test_reshape_remembers_whose_split_it_is():
    eqn = jax.make_jaxpr(lambda x: lax.reshape(x, (24,)))(values(6, 4)).eqns[0]
    site = Site(eqn.primitive, eqn.params, (Array((6, 4), np.float32),), (Array((24,), np.float32),), 2)
    (decision,) = rule_for(eqn.primitive)(site, (S(1, batch=True),))
    assert decision.results[0].batch


def test_attention_heads_keep_batch_and_time():
    """(B, T, H*D) -> (B, H, T, D) -> (B*H, T, D) and back, for each dimension that may be split."""

    def heads(x):
        x = x.reshape(4, 6, 2, 4).transpose(0, 2, 1, 3)
        x = x.reshape(8, 6, 4)
        return x.reshape(4, 2, 6, 4).transpose(0, 2, 1, 3).reshape(24, 8)

    offered = verify(heads, values(4, 6, 8), n=2, outers=(1,))
    assert ((S(0),), (S(0),)) in offered["reshape"]
    assert ((S(1),), (S(2),)) in offered["transpose"]
    assert ((S(2),), (S(1),)) in offered["reshape"]  # (B, T, H, D) -> (B, H, T, D) flattened: H inside (B, H)


def test_vit_patches_keep_the_batch():
    def patches(x):
        x = x.reshape(4, 2, 3, 2, 3, 1)
        return jnp.einsum("bhpwqc->bhwpqc", x).reshape(4, 4, 9)

    offered = verify(patches, values(4, 6, 6, 1), n=4)
    assert offered["reshape"] >= {((S(0),), (S(0),))} and ((S(0),), (S(0),)) in offered["transpose"]


# ------------------------------------------------ the others, one by one ----------------------------------------------


def test_transpose_squeeze_and_rev():
    offered = verify(
        lambda x: jnp.flip(x.transpose(2, 0, 1)[..., None].squeeze(-1), 0), values(4, 6, 2), n=2, outers=(1, 2, 3)
    )
    assert offered["transpose"] >= {((S(1),), (S(2),)), ((S(1, 3),), (S(2, 3),)), ((P,), (P,))}
    assert offered["squeeze"] >= {((S(1),), (S(1),)), ((P,), (P,))}
    assert ((S(1),), (S(1),)) in offered["rev"] and ((S(0),), (S(0),)) not in offered["rev"]


def test_squeeze_shifts_what_follows():
    assert answer(lambda x: lax.squeeze(x, (0, 2)), values(1, 4, 1, 6), placements=(S(3),)) == [((S(3),), (S(1),))]


@pytest.mark.parametrize("shape", [(1, 3), (1, 8), (1, 1)])
def test_a_squeezed_row_lands_on_no_other_dimension(shape):
    """One row that is padded to one for each replica: what follows it would be taken for a padded dimension."""
    assert answer(lambda x: lax.squeeze(x, (0,)), values(*shape), placements=(S(0, extent=8),), n=8) is None


def test_reversing_a_split_dimension_is_refused():
    assert answer(lambda x: lax.rev(x, (0,)), values(4, 6), placements=(S(0),)) is None


def test_concatenate():
    x, y = values(4, 6), values(4, 2)
    offered = verify(lambda x, y: jnp.concatenate([x, y], 1), x, y, n=2)["concatenate"]
    assert offered == {((S(0), S(0)), (S(0),)), ((S(0, 2), S(0, 2)), (S(0, 2),)), ((P, P), (P,)), ((R, R), (R,))}

    def join(x, y):
        return lax.concatenate([x, y], 1)

    assert answer(join, x, y, placements=(P, R)) == [((P, P), (P,))]
    assert answer(join, x, y, placements=(S(0), P)) == [((S(0), S(0)), (S(0),))]
    assert answer(join, x, y, placements=(S(1), S(1))) is None
    assert answer(join, x, y, placements=(Partial("max"), Partial("max"))) == [
        ((Partial("max"),) * 2, (Partial("max"),))
    ]
    assert answer(join, x, y, placements=(Partial("max"), R)) == [((R, R), (R,))]


def test_roll_keeps_the_other_dimension():
    offered = verify(lambda x: jnp.roll(x, 2, axis=1), values(4, 6), n=2)
    assert ((S(0), S(0)), (S(0),)) in offered["concatenate"] and ((S(0),), (S(0),)) in offered["slice"]


def test_pad():
    x = values(4, 6)

    def pad(x, v):
        return lax.pad(x, v, ((0, 0, 0), (1, -2, 1)))

    offered = verify(pad, x, jnp.float32(3), n=2)["pad"]
    assert offered == {((S(0), R), (S(0),)), ((S(0, 2), R), (S(0, 2),)), ((P, P), (P,)), ((R, R), (R,))}
    assert answer(pad, x, jnp.float32(3), placements=(S(1), R)) is None
    assert answer(pad, x, jnp.float32(3), placements=(S(0), P)) == [((S(0), R), (S(0),))]
    assert answer(pad, x, jnp.float32(3), placements=(P, R)) == [((P, P), (P,))]
    assert answer(pad, x, jnp.float32(3), placements=(Partial("max"), R)) == [((R, R), (R,))]


def test_slice():
    x = values(4, 6)
    assert answer(lambda x: x[:, :1], x, placements=(S(0),)) == [((S(0),), (S(0),))]
    assert answer(lambda x: x[:, ::2], x, placements=(S(0, 2),)) == [((S(0, 2),), (S(0, 2),))]
    assert answer(lambda x: x[:, ::2], x, placements=(S(1),)) is None
    assert answer(lambda x: x[1:3], x, placements=(S(0),)) is None
    assert answer(lambda x: x[1:3], x, placements=(Partial("min"),)) == [((Partial("min"),), (Partial("min"),))]
    verify(lambda x: x[:, 0], x, n=2)


def test_the_gradient_of_a_slice_stays_partial():
    offered = verify(jax.grad(lambda x: (x[:, 1:3] ** 2).sum() + x[0, 0]), values(4, 6), n=2)
    assert ((P, P), (P,)) in offered["pad"]


def test_split_stack_and_unstack():
    x = values(4, 6)
    offered = verify(lambda x: jnp.split(x, 3, axis=1), x, n=2)["split"]
    assert offered == {((s,), (s,) * 3) for s in (S(0), S(0, 2), P, R)}
    offered = verify(lambda x, y: jnp.stack([x, y], 1), x, x, n=2)["stack"]
    assert offered >= {((S(0), S(0)), (S(0),)), ((S(1), S(1)), (S(2),)), ((P, P), (P,))}
    offered = verify(lambda x: jnp.unstack(x, axis=0), x, n=2)["unstack"]
    assert offered == {((S(1),), (S(0),) * 4), ((P,), (P,) * 4), ((R,), (R,) * 4)}
    # rows of state that lie apart are cut another way, or gathered; examples are not
    offered = answer(lambda x: jnp.unstack(x, axis=0), x, placements=(S(0),))
    assert offered == [((S(1),), (S(0),) * 4), ((R,), (R,) * 4)]
    assert answer(lambda x: jnp.unstack(x, axis=0), x, placements=(Split(0, batch=True),)) is None


def test_tile_and_repeat():
    x = values(4, 6)
    offered = verify(lambda x: jnp.tile(x, (3, 1)), x, n=2)["tile"]
    assert offered >= {((S(0),), (S(0, 3),)), ((S(0, 2),), (S(0, 6),)), ((S(1),), (S(1),)), ((R,), (R,))}
    assert answer(lambda x: jnp.tile(x, (3, 1)), x, placements=(P,)) == [((R,), (R,))]  # reduced while small
    offered = verify(lambda x: jnp.repeat(x, 3, axis=0), x, n=2)
    assert ((S(0),), (S(0),)) in offered["reshape"]


# ----------------------------------------------- dimensions that are born ---------------------------------------------


def test_broadcast_carries_a_split():
    x = values(4, 1, 6)
    offered = verify(lambda x: jnp.broadcast_to(x, (2, 4, 3, 6)), x, n=2)["broadcast_in_dim"]
    assert offered == {((S(0),), (S(1),)), ((S(0, 2),), (S(1, 2),)), ((S(2),), (S(3),)), ((R,), (R,))}


def test_broadcast_is_born_split_where_it_is_wanted():
    x = values(1, 6)

    def grow(x):
        return lax.broadcast_in_dim(x, (4, 8, 6), (1, 2))

    for want, operand in [(S(0), R), (S(1), R), (S(1, 2), R), (S(2), S(1))]:
        assert answer(grow, x, placements=(R,), wants=(want,)) == [((operand,), (want,)), ((R,), (R,))]
    assert answer(grow, x, placements=(R,), wants=(S(0, 4),)) == [((R,), (R,))]  # 4 = 4 x 1: nothing to split
    assert answer(grow, x, placements=(R,), wants=(None,)) == [((R,), (R,))]
    verify(lambda s: jnp.broadcast_to(s, (4, 6)), jnp.float32(2), n=2, wants=True)


def test_a_partial_is_reduced_before_it_grows():
    x = values(4)
    assert answer(lambda x: lax.broadcast_in_dim(x, (4, 6), (0,)), x, placements=(P,)) == [((R,), (R,))]
    assert answer(lambda x: lax.broadcast_in_dim(x, (4, 1), (0,)), x, placements=(P,)) == [((P,), (P,))]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_iota_counts_from_its_offset(dtype, dim):
    offered = verify(lambda: lax.broadcasted_iota(dtype, (6, 4), dim), n=2, wants=True)["iota"]
    assert offered >= {((), (S(0),)), ((), (S(1),)), ((), (R,))}
    assert ((), (S(dim, 2),)) not in offered  # would count in leaps


def test_iota_counts_exactly_in_low_precision():
    (split, whole) = answer(lambda: lax.iota(jnp.bfloat16, 1024), placements=(), wants=(S(0),), n=8)
    assert split == ((), (S(0),)) and whole == ((), (R,))


def test_empty_and_zeros_like():
    assert answer(lambda: lax.empty((4, 6), np.float32), placements=(), wants=(S(1),)) == [((), (S(1),)), ((), (R,))]
    assert compat.primitive("zeros_like") is not None
    x = Array((4, 6), np.float32)
    site = Site(compat.primitive("zeros_like"), {}, (x,), (x,), 2)
    for placement in (R, S(1), P, Partial("max")):
        answers = rule_for(site.primitive)(site, (placement,))
        (got,) = answers if isinstance(answers, list) else [answers]
        assert got.operands == got.results == (placement,)


# ----------------------------------------------------- identities -----------------------------------------------------


def test_a_barrier_keeps_every_placement():
    x, y = values(4, 6), values(2)
    for placements in [(S(0), P), (S(1, 3), R), (Partial("max"), S(0)), (P, P)]:
        got = answer(lambda x, y: lax.optimization_barrier((x, y)), x, y, placements=placements)
        assert got == [(placements, placements)]
        got = answer(lambda x, y: jax.device_put((x, y)), x, y, placements=placements)
        assert got == [(placements, placements)]


def test_constraints_become_identities():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = values(4, 6)

    def constrain(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))

    for placement in (R, S(0), S(1), P, Partial("min")):
        assert answer(constrain, x, placements=(placement,)) == [((placement,), (placement,))]
        assert answer(lax.stop_gradient, x, placements=(placement,)) == [((placement,), (placement,))]


def test_tie_is_its_second_operand():
    bind = compat.primitive("tie").bind
    for placements in [(P, S(0)), (S(1), R), (R, P)]:
        assert answer(bind, values(4, 6), values(4, 6), placements=placements) == [(placements, placements[1:])]


def test_every_primitive_of_the_family_has_a_rule():
    names = (
        "reshape transpose broadcast_in_dim squeeze concatenate pad rev slice split tile stack unstack iota empty"
        " empty2 zeros_like stop_gradient optimization_barrier sharding_constraint reshard layout_constraint"
        " device_put tie"
    )
    missing = [name for name in names.split() if not rule_for(compat.primitive(name))]
    assert not missing
