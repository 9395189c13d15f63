"""Callbacks in a step happen once per execution, with the values that plain `jit` calls them with."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, Mesh
from steps import mesh_of

import shardstep
from shardstep import Options, ShardstepError

EVERYTHING = Options(min_shard_bytes=0)
EXAMPLES, WIDTH = 16, 8


class Calls:
    """What was called on the host, each call as its label and the bytes of rounded values."""

    def __init__(self):
        self.made = []

    def tell(self, label):
        """A callback that remembers its values under a label."""

        def remember(*values):
            self.made.append((label, [np.round(np.asarray(v, np.float64), 4) + 0.0 for v in values]))

        return remember

    def counted(self):
        return collections.Counter(label for label, _ in self.made)

    def in_order(self):
        flat = [(label, [v.tolist() for v in values]) for label, values in self.made]
        return sorted(flat, key=repr)


def values(w, x):
    """One replicated, one split, one partial value."""
    return w[0, 0] + 1.0, x[:, :2], (x**2).sum()


def train(w, x):
    """The step that the callbacks are in."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.01 * gradient, loss


def printing(tell):
    """As `jax.debug.print`, which says nothing to `tell`."""

    def call(label, *values):
        jax.debug.print(label + " {}" * len(values), *values)

    return call


def calling(tell):
    return lambda label, *values: jax.debug.callback(tell(label), *values)


def logging(tell):
    """As to wandb: an io_callback without results."""
    return lambda label, *values: io_callback(tell(label), None, *values)


FORMS = {}


def form(make):
    FORMS[make.__name__] = make
    return make


@form
def at_top_level(call, w, x):
    call("start")
    one, rows, total = values(w, x)
    call("replicated", one)
    call("split", rows)
    call("partial", total)
    call("all", one, rows, total)
    call("constant", 3)


@form
def in_cond(call, w, x):
    one, rows, total = values(w, x)
    lax.cond(total > 0, lambda: call("taken", one, rows, total), lambda: call("not taken", one))
    lax.cond(total < 0, lambda: call("not taken"), lambda: call("taken without operands"))


@form
def in_scan(call, w, x):
    def iterate(carry, row):
        call("row", carry, row)
        call("none")
        return carry + row.sum(), (row * 2).sum()

    lax.scan(iterate, 0.0, x[:3])
    lax.scan(lambda c, _: (c + (x * c).sum(), call("batch", c, x[:, 0])), 1.0, None, length=2)


@form
def in_while(call, w, x):
    def body(carry):
        call("turn", carry[0], carry[1])
        return carry[0] + 1, carry[1] * 0.5

    lax.while_loop(lambda carry: carry[0] < 3, body, (0, x[:, 0]))


@form
def in_vmap(call, w, x):
    jax.vmap(lambda row: call("example", row.sum()))(x)


@form
def in_custom_rules(call, w, x):
    @jax.custom_vjp
    def f(y):
        return y.sum()

    def forward(y):
        call("forward", y)
        return y.sum(), y.shape

    def backward(shape, g):
        call("backward", g)
        return (jnp.broadcast_to(g, shape),)

    f.defvjp(forward, backward)

    @jax.custom_jvp
    def h(y):
        return jnp.sin(y)

    @h.defjvp
    def tangent(primals, tangents):
        call("tangent", primals[0])
        return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]

    jax.grad(lambda y: f(h(y)))(x[:, :2])


@form
def in_remat(call, w, x):
    @jax.checkpoint
    def block(y):
        call("block", y[:, 0])
        return jnp.sin(y @ w).sum()

    jax.grad(block)(x)


@form
def as_a_progress_bar(call, w, x):
    """As jax-tqdm: a branch of a scan calls the host every other turn."""

    def iterate(w, i):
        lax.cond(i == 0, lambda: call("open", 6), lambda: None)
        w, loss = train(w, x)
        lax.cond(i % 2 == 0, lambda i: call("update", i), lambda i: None, i)
        lax.cond(i == 5, lambda i: call("close", i, loss), lambda i: None, i)
        return w, loss

    lax.scan(iterate, w, jnp.arange(6))


def arguments(examples=EXAMPLES):
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (WIDTH, WIDTH)), jax.random.normal(keys[1], (examples, WIDTH))


def run(step, *args, **how):
    """What the plain and the sharded step called, after checking that they return the same."""
    calls = Calls(), Calls()
    theirs = jax.jit(step(calls[0].tell))(*args)
    jax.effects_barrier()
    ours = shardstep.shard(step(calls[1].tell), batch_argnums=1, options=EVERYTHING, **how)(*args)
    jax.effects_barrier()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return calls


def step_of(name, kind):
    def make(tell):
        call = kind(tell)

        def step(w, x):
            FORMS[name](call, w, x)
            return train(w, x)

        return step

    return make


def assert_called_alike(plain, ours):
    assert plain.made
    assert ours.counted() == plain.counted()
    for (label, found), (_, expected) in zip(ours.in_order(), plain.in_order(), strict=True):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3, err_msg=label)


@pytest.mark.parametrize("kind", [calling, logging])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_called_once_with_the_global_value(name, kind):
    if kind is logging and name in ("in_vmap", "in_custom_rules", "in_remat"):
        pytest.skip("JAX refuses to differentiate io_callback, and to vmap it without ordering")
    assert_called_alike(*run(step_of(name, kind), *arguments(), mesh=mesh_of(4)))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_printed_once(name, capfd):
    def lines():
        jax.effects_barrier()
        return sorted(line.split()[0] for line in capfd.readouterr().out.splitlines() if line[:1].isalpha())

    step, args = step_of(name, printing)(None), arguments()
    jax.jit(step)(*args)
    expected = lines()
    shardstep.shard(step, mesh_of(4), batch_argnums=1, options=EVERYTHING)(*args)
    assert expected
    assert lines() == expected


@pytest.mark.parametrize("examples", [13, 16])
def test_callbacks_on_a_mesh_with_two_axes(examples):
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    assert_called_alike(*run(step_of("at_top_level", calling), *arguments(examples), mesh=mesh))


def test_results_of_an_io_callback_reach_every_replica():
    """Floats, integers and booleans: called once, and the same for all that read them."""

    def make(tell):
        def host(total):
            tell("rate")(total)
            return np.float32(0.25), np.arange(WIDTH, dtype=np.int32), np.asarray([True, False])

        def step(w, x):
            avals = [((), jnp.float32), ((WIDTH,), jnp.int32), ((2,), jnp.bool_)]
            rate, order, flags = io_callback(host, tuple(jax.ShapeDtypeStruct(*a) for a in avals), x.sum())
            new, loss = train(w, x)
            return w + rate * (new - w)[order], (loss, order, flags, x[:, order].sum(1) * rate)

        return step

    assert_called_alike(*run(make, *arguments(), mesh=mesh_of(4)))


def test_ordered_callbacks_are_refused_with_the_way_out():
    def step(w, x):
        io_callback(lambda v: None, None, w[0, 0], ordered=True)
        return train(w, x)

    with pytest.raises(ShardstepError, match=r"io_callback asks for ordered effects.*Leave ordered=True out"):
        shardstep.shard(step, mesh_of(4), batch_argnums=1)(*arguments())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_pure_callback_sees_whole_values(kind):
    def make(tell):
        def host(rows):
            return np.asarray(rows).cumsum(0)

        def step(w, x):
            sums = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            jax.debug.callback(tell("sums"), sums)
            new, loss = train(w, x)
            return new, (loss, sums)

        return step

    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    assert_called_alike(*run(make, *arguments(), mesh=mesh))


def test_a_pure_callback_on_state_that_the_last_call_returned():
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - jax.pure_callback(lambda g: np.asarray(g) / 2, jax.ShapeDtypeStruct(w.shape, w.dtype), gradient)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    w, x = arguments()
    expected = jax.jit(step)(jax.jit(step)(w, x), x)
    sharded = shardstep.shard(step, mesh, batch_argnums=1, options=EVERYTHING)
    np.testing.assert_allclose(sharded(sharded(w, x), x), expected, rtol=1e-5, atol=1e-6)


def test_checkify_reports_what_it_reports_under_jit():
    def step(w, x):
        new, loss = train(w, x)
        checkify.check(loss < 0, "loss is {loss}", loss=loss)
        return new, loss

    args = arguments()
    checked = checkify.checkify(step)
    expected, (_, loss) = jax.jit(checked)(*args)
    found, (_, ours) = shardstep.shard(checked, mesh_of(4), batch_argnums=1, options=EVERYTHING)(*args)
    assert found.get() and found.get()[:12] == expected.get()[:12]
    np.testing.assert_allclose(ours, loss, rtol=1e-5)


def test_profiler_annotations_around_and_inside():
    def make(tell):
        @jax.profiler.annotate_function
        def step(w, x):
            with jax.named_scope("update"), jax.profiler.TraceAnnotation("trace"):
                jax.debug.callback(tell("inside"), w[0, 0])
                return train(w, x)

        return step

    with jax.profiler.StepTraceAnnotation("train", step_num=1):
        assert_called_alike(*run(make, *arguments(), mesh=mesh_of(4)))


def test_a_per_replica_step_calls_as_pmap_does():
    """A replica's own value once per replica; what all replicas share, once."""
    calls = Calls()

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        jax.debug.callback(calls.tell("own"), loss)
        mean = lax.pmean(loss, "batch")
        jax.debug.callback(calls.tell("mean"), mean)
        return w - 0.01 * lax.pmean(gradient, "batch"), mean

    w, x = arguments()
    _, loss = shardstep.shard(step, mesh_of(4), axis_name="batch", batch_argnums=1)(w, x)
    jax.effects_barrier()
    assert calls.counted() == {"own": 4, "mean": 1}
    own = [float(v[0]) for label, v in calls.made if label == "own"]
    np.testing.assert_allclose(np.mean(own), loss, rtol=1e-3)
