"""Random rules: a replica's slice of a draw is bit-equal to that slice of the global draw."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulate import verify

from shardstep._src.core import compat
from shardstep._src.core.layout import REPLICATED, Array, Partial, Split
from shardstep._src.rules import Block, Local, Site, rule_for

KEY = jax.random.key(7)
BITS = compat.primitive("random_bits")


def keys_of(count, impl="threefry2x32"):
    return jax.random.split(jax.random.key(7, impl=impl), count)


def offers(primitive, operands, placements, result, wants=(), n=2, **params):
    """What a rule answers, without running it."""
    site = Site(compat.primitive(primitive), params, operands, result, n, wants)
    decisions = rule_for(site.primitive)(site, placements)
    return decisions and [(d.operands, d.results) for d in decisions]


def bits_offers(key, shape, want, placement=REPLICATED, n=2):
    operand = Array(key.shape, key.dtype)
    result = Array((*key.shape, *shape), jnp.dtype(jnp.uint32))
    return offers("random_bits", (operand,), (placement,), (result,), (want,), n, bit_width=32, shape=shape)


SLICED = {
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.3, shape),
    "normal": jax.random.normal,
    "normal_bf16": lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16),
    "uniform": jax.random.uniform,
    "randint": lambda key, shape: jax.random.randint(key, shape, 0, 1000),
    "randint_int8": lambda key, shape: jax.random.randint(key, shape, 0, 100, jnp.int8),
    "categorical": lambda key, shape: jax.random.categorical(key, jnp.zeros(shape)),
    "dropout": lambda key, shape: jnp.where(jax.random.bernoulli(key, 0.9, shape), 1 / 0.9, 0.0),
}


# The rule sees the bits that are drawn, not what is made of them: one draw of each kind, the plainest at all n.
KINDS_OF_BITS = {
    ("uniform", 2),
    ("uniform", 3),
    ("uniform", 8),
    ("normal_bf16", 3),
    ("randint", 3),
    ("randint_int8", 3),
}


def kept(cases, short):
    """All of the cases; those that are not in `short` are for `make test-all`."""
    return [c if c in short else pytest.param(*c, marks=pytest.mark.thorough) for c in cases]


@pytest.mark.parametrize(("draw", "n"), kept([(d, n) for d in SLICED for n in (2, 3, 8)], KINDS_OF_BITS))
def test_every_slice_of_a_draw_is_the_global_draw(draw, n):
    shape = (n, 2 * n, 3 * n)
    offered = verify(lambda key: SLICED[draw](key, shape), KEY, n=n, outers=(1,), wants=True, only={"random_bits"})
    for dim in range(3):
        assert ((REPLICATED,), (Split(dim),)) in offered["random_bits"]


SHAPES = [(24,), (5, 24), (3, 24, 2)]
WIDTHS = [(shape, width, n) for shape in SHAPES for width in (8, 16, 32) for n in (2, 3, 8)]
EACH_WIDTH_AND_SHAPE = {*(((3, 24, 2), width, 3) for width in (8, 16, 32)), ((24,), 32, 8), ((5, 24), 32, 2)}


@pytest.mark.parametrize(("shape", "width", "n"), kept(WIDTHS, EACH_WIDTH_AND_SHAPE))
def test_bit_widths(shape, width, n):
    dtype = jnp.dtype(f"uint{width}")
    offered = verify(lambda key: jax.random.bits(key, shape, dtype), KEY, n=n, wants=True)
    assert ((REPLICATED,), (Split(shape.index(24)),)) in offered["random_bits"]


def test_64_bits():
    with jax.enable_x64(True):
        offered = verify(lambda key: jax.random.bits(key, (4, 6), jnp.uint64), KEY, n=2, wants=True)
    assert ((REPLICATED,), (Split(0),)) in offered["random_bits"]


def test_a_block_cut_on_two_dimensions():
    """Several mesh axes may cut one draw: the emit believes the block's offsets alone."""
    keys, shape = keys_of(2), (4, 6, 5)
    whole = np.asarray(jax.vmap(lambda k: jax.random.bits(k, shape))(keys))
    site = Site(BITS, {}, (Array((2,), keys.dtype),), (Array((2, *shape), jnp.dtype(jnp.uint32)),), 2, (Split(2),))
    emit = next(d.emit for d in rule_for(BITS)(site, (REPLICATED,)) if d.emit)
    for key, row, column in itertools.product((0, 1), (0, 2), (0, 3)):
        block = Block((2, *shape), (1, 2, 3, 5), (key, row, jnp.int32(column), 0))
        local = Local(BITS, {"bit_width": 32, "shape": shape}, (Block((2,), (1,), (key,)),), (block,))
        (got,) = emit(local, keys[key : key + 1])
        np.testing.assert_array_equal(got, whole[key : key + 1, row : row + 2, column : column + 3])


def test_a_sliced_draw_varies_over_the_axis_in_the_eyes_of_jax():
    mesh = jax.make_mesh((1,), ("data",))
    site = Site(BITS, {}, (Array((), KEY.dtype),), (Array((4, 6), jnp.dtype(jnp.uint32)),), 2, (Split(0),))
    emit = rule_for(BITS)(site, (REPLICATED,))[0].emit

    def draw(key):
        block = Block((4, 6), (2, 6), (2 * jax.lax.axis_index("data"), 0))
        (bits,) = emit(Local(BITS, {"bit_width": 32}, (Block((), (), ()),), (block,)), key)
        return jax.lax.psum(bits, "data")  # refused for a value that does not vary

    spec = jax.sharding.PartitionSpec()
    drawn = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=spec, out_specs=spec))(KEY)
    np.testing.assert_array_equal(drawn, jax.random.bits(KEY, (4, 6))[:2])


@pytest.mark.parametrize("n", [2, 3])
def test_split_keys_stay_split(n):
    keys = keys_of(6)
    by_row = ((Split(0),), (Split(0),))
    offered = verify(jax.vmap(lambda k: jax.random.bits(k, (4,))), keys, n=n, wants=True)
    assert by_row in offered["random_bits"]
    assert by_row in verify(jax.vmap(lambda k: jax.random.split(k, (2, 3))), keys, n=n)["random_split"]
    assert by_row in verify(jax.random.key_data, keys, n=n)["random_unwrap"]
    assert by_row in verify(jax.random.wrap_key_data, jax.random.key_data(keys), n=n)["random_wrap"]
    assert by_row in verify(jax.random.clone, keys, n=n)["random_clone"]
    assert by_row in verify(jax.vmap(jax.random.key), jnp.arange(6), n=n)["random_seed"]


def test_key_arrays_of_two_dimensions():
    keys = keys_of((4, 6))
    offered = verify(lambda k: BITS.bind(k, bit_width=32, shape=(2,)), keys, n=2, wants=True)["random_bits"]
    assert {((Split(0),), (Split(0),)), ((Split(1),), (Split(1),)), ((REPLICATED,), (Split(2),))} <= offered


def test_key_data_is_never_split():
    """The two words of a key belong together."""
    offered = verify(jax.random.wrap_key_data, jax.random.key_data(keys_of(6)), n=2)["random_wrap"]
    assert all(operand != Split(1) for (operand,), _ in offered)


def test_fold_in_pairs_keys_with_data():
    keys, data = keys_of(6), jnp.arange(6)
    fold = jax.random.fold_in
    assert ((Split(0), Split(0)), (Split(0),)) in verify(jax.vmap(fold), keys, data, n=3)["random_fold_in"]
    one_key = verify(jax.vmap(fold, (None, 0)), KEY, data, n=3)["random_fold_in"]
    assert ((REPLICATED, Split(0)), (Split(0),)) in one_key
    one_datum = verify(jax.vmap(fold, (0, None)), keys, 3, n=3)["random_fold_in"]
    assert ((Split(0), REPLICATED), (Split(0),)) in one_datum


def test_replicated_keys_are_cut_for_split_draws():
    """`vmap(dropout)(split(key, batch), x)`: each replica draws for its own examples."""
    assert ((Split(0),), (Split(0),)) in bits_offers(keys_of(6), (4,), Split(0))


def test_batch_mark_survives():
    (_, (result,)), *_ = bits_offers(KEY, (4, 6), Split(0, batch=True))
    assert result.batch


def test_gamma_splits_over_keys_only():
    """The key of a gamma draw is split over the trailing dimensions of alpha, whose size must be the global one."""
    by_key = verify(jax.vmap(jax.random.gamma), keys_of(2), jnp.ones((2, 2)), n=2, limit=2, only={"random_gamma"})
    assert ((Split(0), Split(0)), (Split(0),)) in by_key["random_gamma"]
    keys, alpha = Array((), KEY.dtype), Array((2, 2), jnp.dtype(jnp.float32))
    for dim in (0, 1):
        assert offers("random_gamma", (keys, alpha), (REPLICATED, Split(dim)), (alpha,)) is None
    replicated = [((REPLICATED, REPLICATED), (REPLICATED,))]
    assert offers("random_gamma", (keys, alpha), (REPLICATED, REPLICATED), (alpha,)) == replicated


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_generators_that_draw_one_stream(impl):
    """A vmap of rbg draws uses the first key for all rows: splitting the keys would change the numbers."""
    keys = keys_of(6, impl)
    assert bits_offers(keys[0], (4, 6), Split(0)) == [((REPLICATED,), (REPLICATED,))]
    assert bits_offers(keys, (4,), None, placement=Split(0)) is None
    verify(jax.vmap(lambda k: jax.random.bits(jax.random.split(jax.random.fold_in(k, 1))[0], (4,))), keys, n=2)


def test_rbg_keys_are_derived_one_by_one():
    derive = jax.vmap(lambda k: jax.random.split(jax.random.fold_in(k, 1), 3))
    offered = verify(derive, keys_of(6, "rbg"), n=2)
    assert ((Split(0),), (Split(0),)) in offered["random_split"]
    assert ((Split(0), REPLICATED), (Split(0),)) in offered["random_fold_in"]


def test_threefry_before_it_was_partitionable():
    """The older stream pairs elements across the whole draw: no block can be drawn alone, but keys still can."""
    with jax.threefry_partitionable(False):
        assert bits_offers(KEY, (4, 6), Split(0)) == [((REPLICATED,), (REPLICATED,))]
        offered = verify(jax.vmap(lambda k: jax.random.bits(k, (4,))), keys_of(6), n=2, wants=True)
    assert ((Split(0),), (Split(0),)) in offered["random_bits"]


@pytest.mark.parametrize("want", [Split(0, outer=2), Split(1), None])
def test_draws_that_cannot_be_cut(want):
    assert bits_offers(KEY, (4, 5), want) == [((REPLICATED,), (REPLICATED,))]


def test_counters_of_more_than_32_bits_are_not_offered():
    assert bits_offers(KEY, (2**16, 2**16), Split(0)) == [((REPLICATED,), (REPLICATED,))]
    assert ((REPLICATED,), (Split(0),)) in bits_offers(KEY, (2**16, 2**16 - 1), Split(0))


def test_stateful_generators_are_replicated():
    state = jnp.arange(4, dtype=jnp.uint32)
    offered = verify(lambda s: jax.lax.rng_bit_generator(s, (4, 6)), state, n=2)["rng_bit_generator"]
    assert offered == {((REPLICATED,), (REPLICATED, REPLICATED))}


def test_a_sum_of_seeds_is_reduced_first():
    seeds = Array((6,), jnp.dtype(jnp.int32))
    keys = Array((6,), KEY.dtype)
    assert offers("random_seed", (seeds,), (Partial(),), (keys,)) == [((REPLICATED,), (REPLICATED,))]
