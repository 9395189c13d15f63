"""Loops and conditions around the update: the same numbers as the plain step, communicating no more than one update.

A form is a function that makes a `Case`. It is written once for both step styles: `mean` averages over the replicas in
a step for one replica (`lax.pmean`) and does nothing in a step for the whole batch.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from steps import (
    OPTIMIZER,
    adam_state,
    adam_step,
    assert_same,
    batch,
    compilations,
    errors,
    loss,
    mesh_of,
    update,
    weights,
)

import shardstep
from shardstep._src.tools.hlo import collectives

REPLICAS = (pytest.param(2, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.once), 8)
EXAMPLES = 192  # up to 8 microbatches that 2, 3 and 8 replicas share evenly
WEIGHT = 96 * 64 * 4  # bytes


class Case(NamedTuple):
    """A step, and what to call it with: the state, then the other arguments of each call."""

    step: Callable[..., tuple[Any, Any]]
    state: Any
    calls: list[tuple[Any, ...]]
    batch_axis: int = 0
    tolerance: float = 1e-5


Mean = Callable[[Any], Any]
Form = Callable[[Mean], Case]


def batches(count=3, examples=EXAMPLES):
    return [(batch(i, examples),) for i in range(count)]


def trained(gradients, state=None, calls=None, apply=update, **more):
    """Adam on what `gradients(params, *arguments) -> (loss, gradients)` finds."""

    def step(state, *arguments):
        params, moments = state
        value, grads = gradients(params, *arguments)
        return apply(params, moments, grads), value

    return Case(step, state or adam_state(), calls or batches(), **more)


def descend(params, gradients, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients)


def chosen_by(optimizer):
    """The update by another optimizer than Adam, and its first state."""

    def apply(params, moments, gradients):
        changes, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, changes), moments

    return apply, (weights(), optimizer.init(weights()))


def counted(state=None):
    return (adam_state() if state is None else state, jnp.int32(0))


# -- loops in the model ----------------------------------------------------------------------------------------------


def tower():
    """Four layers of one shape, stacked."""
    params = {"w": jax.random.normal(jax.random.key(0), (4, 96, 96)) / 10, "b": jnp.zeros((4, 96))}
    return params, OPTIMIZER.init(params)


def through(layer, params, batch):
    y, _ = lax.scan(lambda x, p: (layer(x, p), None), batch["x"], params)
    return jnp.mean((y - batch["y"]) ** 2)


def dense(x, p):
    return jnp.tanh(x @ p["w"] + p["b"])


def layers(mean, layer=dense) -> Case:
    return trained(lambda p, b: mean(jax.value_and_grad(functools.partial(through, layer))(p, b)), tower())


def layers_remat(mean) -> Case:
    return layers(mean, jax.checkpoint(dense))


def layers_and_a_branch(mean) -> Case:
    """Nested: in each layer a `switch` on its number, in which there is a loop."""

    def refine(x, p):
        return lax.fori_loop(0, 2, lambda _, h: h + 0.1 * dense(h, p), x)

    def layer(carry, p):
        x, i = carry
        return lax.switch(i % 3, [dense, refine, lambda x, p: x + dense(x, p)], x, p), i + 1

    def objective(params, batch):
        (y, _), _ = lax.scan(lambda c, p: (layer(c, p), None), (batch["x"], 0), params)
        return jnp.mean((y - batch["y"]) ** 2)

    return trained(lambda p, b: mean(jax.value_and_grad(objective)(p, b)), tower())


def rnn(mean, batch_axis=0) -> Case:
    """Over time; the batch on the first dimension, or on the second behind time."""

    def cell(params, h, x):
        h = jnp.tanh(x @ params["w1"] + h + params["b"])
        return h, h @ params["w2"]

    def objective(params, x, y):
        x, y = (x, y) if batch_axis else (x.swapaxes(0, 1), y.swapaxes(0, 1))
        _, found = lax.scan(functools.partial(cell, params), jnp.zeros((x.shape[1], 64)), x)
        return jnp.mean((found - y) ** 2)

    def sequences(seed):
        data = jax.random.normal(jax.random.key(seed), (2, 5, 48, 96))
        return tuple(data if batch_axis else data.swapaxes(1, 2))

    calls = [sequences(i) for i in range(3)]
    grads = jax.value_and_grad(objective)
    return trained(lambda p, x, y: mean(grads(p, x, y)), calls=calls, batch_axis=batch_axis)


def rnn_time_major(mean) -> Case:
    return rnn(mean, batch_axis=1)


MODELS: list[Form] = [layers, layers_remat, layers_and_a_branch, rnn, rnn_time_major]


# -- gradient accumulation -------------------------------------------------------------------------------------------


def microbatches(batch, m):
    return jax.tree.map(lambda x: x.reshape(m, -1, *x.shape[1:]), batch)


def add(total, one):
    return jax.tree.map(jnp.add, total, one)


def over_scan(m, params, batch):
    one = jax.value_and_grad(loss)
    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(lambda acc, b: (add(acc, one(params, b)), None), start, microbatches(batch, m))
    return jax.tree.map(lambda t: t / m, total)


def over_fori(m, params, batch):
    size = batch["x"].shape[0] // m

    def body(i, acc):
        taken = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size), batch)
        return add(acc, jax.value_and_grad(loss)(params, taken))

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(lambda t: t / m, lax.fori_loop(0, m, body, start))


def over_python(m, params, batch):
    size = batch["x"].shape[0] // m
    parts = [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(m)]
    return jax.tree.map(lambda t: t / m, functools.reduce(add, [jax.value_and_grad(loss)(params, p) for p in parts]))


def accumulated(over, m, examples=EXAMPLES) -> Form:
    def form(mean):
        return trained(lambda p, b: mean(over(m, p, b)), calls=batches(examples=examples))

    form.__name__ = f"{over.__name__}_{m}_of_{examples}"
    return form


def by_optimizer(optimizer, name) -> Form:
    """Over nine calls, so that two boundaries of four are crossed."""

    def form(mean):
        apply, state = chosen_by(optimizer)
        return trained(lambda p, b: mean(jax.value_and_grad(loss)(p, b)), state, batches(9, examples=24), apply)

    form.__name__ = name
    return form


def with_batch_statistics(mean) -> Case:
    """Each microbatch is normalised by itself: the same examples must stay together."""

    def normalised(params, running, batch):
        h = jnp.tanh(batch["x"] @ params["w1"] + params["b"])
        centre, spread = h.mean(0), h.var(0)
        h = (h - centre) * lax.rsqrt(spread + 1e-3)
        running = jax.tree.map(lambda r, s: 0.9 * r + 0.1 * s, running, (centre, spread))
        return jnp.mean((h @ params["w2"] - batch["y"]) ** 2), running

    def step(state, batch):
        (params, moments), running = state

        def body(carry, b):
            acc, running = carry
            (value, running), grads = jax.value_and_grad(normalised, has_aux=True)(params, running, b)
            return (add(acc, grads), running), value

        start = (jax.tree.map(jnp.zeros_like, params), running)
        (grads, running), values = lax.scan(body, start, microbatches(batch, 4))
        return (update(params, moments, mean(grads)), mean(running)), mean(values)

    return Case(step, (adam_state(), (jnp.zeros(64), jnp.ones(64))), batches())


def with_dropout(mean) -> Case:
    """A mask for each microbatch: whoever gets an example must drop what one device would drop."""

    def dropped(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w1"] + params["b"])
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        return jnp.mean((h @ params["w2"] - batch["y"]) ** 2)

    def gradients(params, batch, key):
        def body(acc, one):
            return add(acc, jax.value_and_grad(dropped)(params, *one)), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return mean(lax.scan(body, start, (microbatches(batch, 4), jax.random.split(key, 4)))[0])

    return trained(gradients, calls=[(b, jax.random.key(i)) for i, (b,) in enumerate(batches())])


ACCUMULATIONS: list[Form] = [
    accumulated(over_scan, 8),
    accumulated(over_scan, 3, examples=144),
    accumulated(over_fori, 8),
    accumulated(over_fori, 3, examples=144),
    accumulated(over_python, 4),
    by_optimizer(optax.MultiSteps(OPTIMIZER, 4), "multi_steps"),
    by_optimizer(optax.chain(OPTIMIZER, optax.apply_every(4)), "apply_every"),
    with_batch_statistics,
    with_dropout,
]


# -- many steps in one call ------------------------------------------------------------------------------------------


def stacked(k):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(batch(i, 24) for i in range(k)))


def one_step(mean):
    return trained(lambda p, b: mean(jax.value_and_grad(loss)(p, b))).step


def steps_in_a_scan(mean, k=3) -> Case:
    return Case(lambda state, b: lax.scan(one_step(mean), state, b), adam_state(), [(stacked(k),)] * 2, batch_axis=1)


def steps_in_a_fori_loop(mean, k=3) -> Case:
    """As Keras does with `steps_per_execution`: the last loss is returned."""

    def step(state, batches):
        def body(i, carry):
            return one_step(mean)(carry[0], jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), batches))

        return lax.fori_loop(0, k, body, (state, jnp.zeros(())))

    return Case(step, adam_state(), [(stacked(k),)] * 2, batch_axis=1)


def steps_that_accumulate(mean) -> Case:
    """Nested: microbatches inside steps inside one call."""
    inner = trained(lambda p, b: mean(over_scan(2, p, b))).step
    data = jax.tree.map(lambda *xs: jnp.stack(xs), *(batch(i, 48) for i in range(3)))
    return Case(lambda state, b: lax.scan(inner, state, b), adam_state(), [(data,)] * 2, batch_axis=1)


def steps_until_good_enough(mean) -> Case:
    """A `while_loop` of steps on one batch whose predicate reads the loss."""

    def step(state, batch):
        def again(carry):
            (_, value), i = carry
            return (value > 0.9) & (i < 10)

        def once(carry):
            (state, _), i = carry
            return one_step(mean)(state, batch), i + 1

        (state, value), steps = lax.while_loop(again, once, ((state, jnp.float32(jnp.inf)), 0))
        return state, (value, steps)

    return Case(step, adam_state(), batches(examples=24))


MULTI_STEPS: list[Form] = [steps_in_a_scan, steps_in_a_fori_loop, steps_that_accumulate, steps_until_good_enough]


# -- conditions around the update ------------------------------------------------------------------------------------


def with_an_infinity():
    """The second of three batches spoils the gradients."""
    first, (bad,), last = batches(examples=24)
    return [first, ({**bad, "x": bad["x"].at[5, 7].set(jnp.inf)},), last]


def finite(tree):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def skip_by_cond(mean) -> Case:
    def apply(params, moments, grads):
        return lax.cond(finite(grads), lambda: update(params, moments, grads), lambda: (params, moments))

    return trained(lambda p, b: mean(jax.value_and_grad(loss)(p, b)), calls=with_an_infinity(), apply=apply)


def skip_by_where(mean) -> Case:
    def apply(params, moments, grads):
        new, old = update(params, moments, grads), (params, moments)
        return jax.tree.map(functools.partial(jnp.where, finite(grads)), new, old)

    return trained(lambda p, b: mean(jax.value_and_grad(loss)(p, b)), calls=with_an_infinity(), apply=apply)


def dynamic_loss_scale(mean) -> Case:
    """bf16 weights, f32 masters; the scale is halved where it overflows and doubled after two good steps."""

    def low(params):
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def step(state, batch):
        (params, masters, moments), (scale, good) = state
        value, grads = jax.value_and_grad(lambda p, b: loss(p, b).astype(jnp.float32) * scale)(params, low(batch))
        value, grads = mean((value / scale, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)))

        def keep():
            return (params, masters, moments), (scale / 2, jnp.int32(0))

        def take():
            new, after = update(masters, moments, grads)
            grown = good == 1
            return (low(new), new, after), (jnp.where(grown, 2 * scale, scale), jnp.where(grown, 0, good + 1))

        return lax.cond(finite(grads), take, keep), value

    masters, moments = adam_state()
    # half precision: each replica rounds its own term of a gradient
    return Case(
        step, ((low(masters), masters, moments), (jnp.float32(8), jnp.int32(0))), with_an_infinity(), tolerance=2**-4
    )


def ema_every_other_step(mean) -> Case:
    def step(state, batch):
        ((params, moments), average), count = state
        (params, moments), value = one_step(mean)((params, moments), batch)
        average = lax.cond(
            count % 2 == 0, lambda: jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), lambda: average
        )
        return (((params, moments), average), count + 1), value

    return Case(step, counted((adam_state(), weights(1))), batches(examples=24))


def lookahead(mean) -> Case:
    """Every other step the slow weights move half-way to the fast ones, which start again from there."""

    def step(state, batch):
        (fast, slow), count = state
        (params, moments), value = one_step(mean)(fast, batch)

        def synchronise():
            new = jax.tree.map(lambda s, p: s + 0.5 * (p - s), slow, params)
            return new, new

        params, slow = lax.cond(count % 2 == 1, synchronise, lambda: (params, slow))
        return (((params, moments), slow), count + 1), value

    return Case(step, counted((adam_state(), weights(1))), batches(examples=24))


def adversaries(mean, alternate=True) -> Case:
    """A generator and a critic with an optimizer each; in turn, by `cond`, or one after the other in each step."""

    def critic_loss(critic, generator, batch):
        made = jnp.tanh(batch["x"] @ generator["w1"]) @ generator["w2"]
        score = lambda y: jnp.tanh(y @ critic["w1"]) @ critic["w2"]  # noqa: E731
        return jnp.mean(jax.nn.softplus(score(made)) + jax.nn.softplus(-score(batch["y"])))

    def train_critic(critic, generator, batch):
        value, grads = jax.value_and_grad(critic_loss)(critic[0], generator[0], batch)
        return (update(*critic, mean(grads)), generator), mean(value)

    def train_generator(critic, generator, batch):
        value, grads = jax.value_and_grad(lambda g: -critic_loss(critic[0], g, batch))(generator[0])
        return (critic, update(*generator, mean(grads))), mean(value)

    def step(state, batch):
        players, count = state
        if alternate:
            players, value = lax.cond(count % 2 == 0, train_critic, train_generator, *players, batch)
        else:
            players, _ = train_critic(*players, batch)
            players, value = train_generator(*players, batch)
        return (players, count + 1), value

    return Case(step, counted((adam_state(0), adam_state(1))), batches(examples=24))


def adversaries_together(mean) -> Case:
    return adversaries(mean, alternate=False)


def sharpness_aware(mean) -> Case:
    """SAM: the gradient is taken a little uphill."""

    def gradients(params, batch):
        uphill = mean(jax.grad(loss)(params, batch))
        there = descend(params, uphill, rate=-0.05 / (optax.tree.norm(uphill) + 1e-6))
        return mean(jax.value_and_grad(loss)(there, batch))

    return trained(gradients)


def frozen(optimizer, name) -> Form:
    def form(mean):
        apply, state = chosen_by(optimizer)
        return trained(lambda p, b: mean(jax.value_and_grad(loss)(p, b)), state, batches(examples=24), apply)

    form.__name__ = name
    return form


def backtracking(mean) -> Case:
    """A `while_loop` on reduced values: the step is halved until the loss falls enough."""

    def apply(params, moments, grads):
        limit = 0.05 * optax.tree.norm(params)
        shrunk = lax.while_loop(
            lambda g: optax.tree.norm(g) > limit, lambda g: jax.tree.map(lambda x: 0.7 * x, g), grads
        )
        return update(params, moments, shrunk)

    def gradients(params, batch):
        value, grads = mean(jax.value_and_grad(loss)(params, batch))
        rate = lax.while_loop(
            lambda rate: mean(loss(descend(params, grads, rate), batch)) > 0.9 * value, lambda rate: rate / 2, 64.0
        )
        return value, jax.tree.map(lambda g: rate * g, grads)

    return trained(gradients, calls=batches(examples=24), apply=apply)


def objective_by_switch(mean) -> Case:
    """What is minimised depends on the step."""
    kinds = [
        loss,
        lambda p, b: jnp.mean(jnp.sqrt(errors(p, b))),
        lambda p, b: loss(p, b) + 1e-3 * jnp.sum(p["w1"] ** 2),
    ]

    def step(state, batch):
        (params, moments), count = state
        value, grads = jax.value_and_grad(lambda p: lax.switch(count % 3, kinds, p, batch))(params)
        return (update(params, moments, mean(grads)), count + 1), mean(value)

    return Case(step, counted(), batches(examples=24))


MASK = {"w1": False, "b": True, "w2": True}
LABELS = {"w1": "still", "b": "moves", "w2": "moves"}
CONDITIONS: list[Form] = [
    skip_by_cond,
    skip_by_where,
    dynamic_loss_scale,
    ema_every_other_step,
    lookahead,
    adversaries,
    adversaries_together,
    sharpness_aware,
    frozen(optax.masked(OPTIMIZER, MASK), "masked"),
    frozen(optax.multi_transform({"still": optax.set_to_zero(), "moves": OPTIMIZER}, LABELS), "multi_transform"),
    backtracking,
    objective_by_switch,
]

FORMS = {form.__name__: form for form in (*MODELS, *ACCUMULATIONS, *MULTI_STEPS, *CONDITIONS)}
# All tests of a form are on one worker of pytest-xdist: they share the plain run.
TOGETHER = [pytest.param(name, marks=pytest.mark.xdist_group(f"loop {name}")) for name in FORMS]


# -- the same numbers ------------------------------------------------------------------------------------------------

# With these, one replica's step is not the whole batch's: statistics and masks are each replica's own.
OF_ITS_OWN = {"with_batch_statistics", "with_dropout"}


def run(step, case):
    state, metrics = case.state, []
    for arguments in case.calls:
        state, found = step(state, *arguments)
        metrics.append(jax.device_get(found))
    return jax.device_get(state), metrics


@functools.cache
def plain(name):
    """The form for the whole batch, and what it computes on one device."""
    case = FORMS[name](lambda x: x)
    return case, run(jax.jit(case.step), case)


def mapped(case, n):
    """What `shard_map` makes of a step for one replica."""
    examples = PartitionSpec(*[None] * case.batch_axis, "batch")
    inputs = (PartitionSpec(), *(PartitionSpec() if is_key(a) else examples for a in case.calls[0]))
    return jax.jit(
        jax.shard_map(case.step, mesh=mesh_of(n, "batch"), in_specs=inputs, out_specs=PartitionSpec(), check_vma=False)
    )


def is_key(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def sharded(case, n, **how) -> shardstep.ShardedStep:
    examples = tuple(1 + i for i, a in enumerate(case.calls[0]) if not is_key(a))
    return shardstep.shard(case.step, mesh_of(n), batch_argnums=examples, batch_axis=case.batch_axis, **how)


def planned(case, n, **how) -> shardstep.Plan:
    return sharded(case, n, **how).plan(case.state, *case.calls[0])


def assert_agrees(case, expected, n, **how):
    assert_same(run(sharded(case, n, **how), case), expected, case.tolerance)


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize("name", TOGETHER)
def test_a_step_for_the_whole_batch(name, n):
    assert_agrees(*plain(name), n)


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize("name", TOGETHER)
def test_a_step_for_one_replica(name, n):
    """A mean over replicas of means over their examples is the mean over the batch: both styles are one training."""
    case = FORMS[name](lambda x: lax.pmean(x, "batch"))
    expected = run(mapped(case, n), case) if name in OF_ITS_OWN else plain(name)[1]
    assert_agrees(case, expected, n, axis_name="batch")


@pytest.mark.parametrize("n", [pytest.param(3, marks=pytest.mark.thorough), 8])
@pytest.mark.parametrize("form", [*MULTI_STEPS, ACCUMULATIONS[0], layers_remat, skip_by_cond], ids=lambda f: f.__name__)
def test_weights_that_rest_sharded(form, n):
    assert_agrees(*plain(form.__name__), n, weights="sharded")


@pytest.mark.parametrize("over", [over_scan, over_fori, over_python])
def test_microbatches_that_replicas_cannot_share_evenly(over):
    """Six examples each, eight replicas."""
    case = accumulated(over, 4, examples=24)(lambda x: x)
    assert_agrees(case, run(jax.jit(case.step), case), 8)


# -- where it communicates -------------------------------------------------------------------------------------------


def compiled(case, n=8, **how):
    return sharded(case, n, **how).lower(case.state, *case.calls[0]).compile()


def sent(program, **where):
    """(kind, bytes) of every collective of a compiled program, as often as it occurs."""
    found = collectives(program.as_text())
    return Counter((c.kind, c.bytes) for c in found if all(getattr(c, k) == v for k, v in where.items()))


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", TOGETHER)
def test_no_more_bytes_than_the_replicated_step(name, n):
    wire = planned(FORMS[name](lambda x: x), n).wire_bytes
    # a line search reads the gradients whole: an all-reduce. Sharded moments then still cost a gather of the weights.
    gathers = 2 * WEIGHT if name == "backtracking" else 0
    assert wire.sharded <= wire.replicated * 1.001 + 1024 + gathers


@pytest.mark.parametrize("over", [over_scan, over_fori])
def test_gradients_are_reduced_once_after_the_microbatches(over):
    found = collectives(compiled(accumulated(over, 8)(lambda x: x)).as_text())
    assert not [c for c in found if c.in_loop and c.bytes >= WEIGHT], found
    reductions = [c for c in found if "reduce" in c.kind and c.bytes >= WEIGHT]
    assert {c.kind for c in reductions} == {"reduce-scatter"}
    assert sum(c.bytes for c in reductions) == 2 * WEIGHT  # w1 and w2, in one collective or in two


def test_examples_stay_where_they_are_if_it_does_not_matter():
    """A sum over microbatches: which example is in which makes no difference, so each replica deals out its own."""
    plan = planned(accumulated(over_scan, 8)(lambda x: x), 8)
    assert not plan.fallbacks
    assert {c.kind for c in plan.collectives if c.bytes > 1024} == {"reduce-scatter", "all-gather"}
    assert not [c for c in plan.collectives if EXAMPLES in c.shape], str(plan)


def test_moments_are_no_weights():
    """64 examples each, 3 replicas: the microbatches are whole everywhere, and their 96 features are no examples."""
    plan = planned(accumulated(over_fori, 3)(lambda x: x), 3)
    assert {leaf.path for leaf in plan.leaves if leaf.role == "weight"} == {
        f"state[0]['{w}']" for w in ("w1", "b", "w2")
    }


@pytest.mark.parametrize("form", [with_batch_statistics, with_dropout])
def test_examples_move_once_where_it_matters(form):
    """Same examples in the same microbatch: the input is gathered once, before the loop, and the plan says so."""
    plan = planned(form(lambda x: x), 8)
    moved = [c for c in plan.collectives if any(EXAMPLES in shape for shape in c.shapes)]
    assert [shape for c in moved for shape in c.shapes] == [(EXAMPLES, 96)] * 2  # x and y
    assert not any(c.loop for c in moved) and all("microbatches" in c.line for c in moved)


def test_the_accumulator_of_the_optimizer_rests_split():
    plan = planned(FORMS["multi_steps"](lambda x: x), 8)
    accumulators = [leaf for leaf in plan.leaves if "acc_grads" in leaf.path and leaf.bytes_before >= WEIGHT]
    assert [(leaf.role, leaf.layout) for leaf in accumulators] == [("auxiliary", "split(0)")] * 2
    assert all(leaf.reason for leaf in accumulators)


# -- ten steps in one program ----------------------------------------------------------------------------------------


def silent(step):
    """Without the loss: its reduction waits for the end of the loop."""
    return lambda state, batch: (step(state, batch)[0], None)


ONE = Case(silent(adam_step), adam_state(), batches(1, examples=24))
TEN = Case(lambda s, b: lax.scan(silent(adam_step), s, b), adam_state(), [(stacked(10),)] * 2, batch_axis=1)


def memory(program, case, n=8):
    """What a replica needs for state and temporaries."""
    found = program.memory_analysis()
    examples = sum(x.nbytes for x in jax.tree.leaves(case.calls[0])) // n
    return found.argument_size_in_bytes - examples + found.temp_size_in_bytes


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_ten_steps_are_ten_times_one(weights):
    one, ten = compiled(ONE, weights=weights), compiled(TEN, weights=weights)
    assert sent(ten, in_loop=True) == sent(one)
    assert not sent(ten, in_loop=False)
    assert memory(ten, TEN) <= memory(one, ONE) + WEIGHT


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_ten_steps_are_one_executable_with_split_state(weights):
    step = sharded(TEN, 8, weights=weights)
    state, examples = step.place(TEN.state, *TEN.calls[0])
    with compilations() as count:
        for _ in range(2):
            params, moments = state
            large = [x for x in jax.tree.leaves(moments) if x.nbytes >= WEIGHT]
            assert len(large) == 4 and all(not x.is_fully_replicated for x in large)
            assert params["w1"].is_fully_replicated == (weights == "replicated")
            state, _ = step(state, examples)
    assert count == [1]


# -- replicas that would part ----------------------------------------------------------------------------------------


def own_loss(params, batch):
    """A loop that ends when this replica's own loss is small."""
    return lax.while_loop(lambda r: loss(params, batch) * r > 0.1, lambda r: r / 2, jnp.float32(1))


def trained_at_own_rate(rate_of, nested=False):
    def gradients(params, batch):
        def scaled(batch):
            rate = rate_of(params, batch)
            return jax.tree.map(lambda g: rate * g, jax.value_and_grad(loss)(params, batch))

        found = lax.map(scaled, microbatches(batch, 2)) if nested else scaled(batch)
        return lax.pmean(jax.tree.map(lambda x: x.mean(0), found) if nested else found, "batch")

    return trained(gradients)


@pytest.mark.parametrize("nested", [False, True])
def test_replicas_may_leave_a_loop_at_different_times(nested):
    """As under `pmap`: nobody waits for anybody inside it."""
    case = trained_at_own_rate(own_loss, nested)
    sharded = shardstep.shard(case.step, mesh_of(8), axis_name="batch")
    mapped = {"in_specs": (PartitionSpec(), PartitionSpec("batch")), "out_specs": PartitionSpec(), "check_vma": False}
    plain = jax.jit(jax.shard_map(case.step, mesh=mesh_of(8, "batch"), **mapped))
    assert_same(sharded(case.state, *case.calls[0]), plain(case.state, *case.calls[0]))


@pytest.mark.parametrize("where", ["in the test", "in the body"])
def test_a_predicate_that_differs_between_replicas_that_communicate(where):
    def rate(params, batch):
        mine = loss(params, batch)
        if where == "in the test":
            return lax.while_loop(
                lambda r: lax.ppermute(mine * r, "batch", [(0, 1), (1, 0)]) > 0.1, lambda r: r / 2, 1.0
            )
        return lax.while_loop(lambda r: mine * r > 0.1, lambda r: r / 2 + 0 * lax.pmean(r, "batch"), 1.0)

    with pytest.raises(shardstep.ShardstepError, match=r"leave the loop at different times, and it communicates \(p"):
        planned(trained_at_own_rate(rate), 2, axis_name="batch")


def test_a_predicate_on_reduced_values_is_no_error():
    """The same loop, its predicate averaged."""

    def gradients(params, batch):
        value, grads = lax.pmean(jax.value_and_grad(loss)(params, batch), "batch")
        rate = lax.while_loop(lambda r: value * r > 0.1, lambda r: r / 2, jnp.float32(1))
        return value, jax.tree.map(lambda g: rate * g, grads)

    assert not planned(trained(gradients), 8, axis_name="batch").fallbacks
