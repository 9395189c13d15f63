"""The plan as a user reads it: roles, reasons, what is sent, what could not be sharded and where it was written."""

from __future__ import annotations

import json
import pickle
import sys

import jax
import jax.numpy as jnp
import programs
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec
from steps import adam_state, adam_step, assert_same, batch, loss, mesh_of, weights

import shardstep
from shardstep._src import api
from shardstep._src.core.program import flatten
from shardstep._src.planning.propagation.forward import Forward
from shardstep._src.rules import Decision, contract
from shardstep._src.rules.contract import splits

BIG = 96 * 64 * 4


def plan_for(step, *arguments, **options):
    return shardstep.shard(step, **options).plan(*arguments)


@pytest.fixture(scope="module")
def adam_plan():
    return plan_for(adam_step, adam_state(), batch())


def leaf_of(plan, path):
    (found,) = [leaf for leaf in plan.leaves if leaf.path == path]
    return found


# -- roles ------------------------------------------------------------------------------------------------------------


def everything_step(state, batch, rate, key):
    """One leaf of each role: weights, momentum, an average and a master copy, a frozen table."""
    table = state["frozen"]

    def objective(params):
        noise = 0.01 * jax.random.normal(key, batch["x"].shape)
        return loss(params, {**batch, "x": batch["x"] + noise + table[0]})

    value, gradients = jax.value_and_grad(objective)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    master = jax.tree.map(lambda w, m: w - rate * m, state["master"], momentum)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), master)
    average = jax.tree.map(lambda a, w: 0.99 * a + 0.01 * w, state["average"], params)
    new = {"params": params, "momentum": momentum, "master": master, "average": average}
    return {**new, "frozen": table, "count": state["count"] + 1}, value


def everything():
    w = weights()
    state = {k: jax.tree.map(jnp.copy, w) for k in ("params", "momentum", "master", "average")}
    return {**state, "frozen": jnp.ones((128, 96)), "count": jnp.zeros((), jnp.int32)}, batch(), 0.1, jax.random.key(0)


def test_roles():
    plan = plan_for(everything_step, *everything())
    roles = {leaf.path: leaf.role for leaf in plan.leaves}
    assert roles["batch['x']"] == roles["batch['y']"] == "batch"
    assert roles["rate"] == roles["key"] == "input"
    assert roles["state['frozen']"] == "frozen"
    assert roles["state['count']"] == "auxiliary"
    for name in ("w1", "b", "w2"):
        assert roles[f"state['params']['{name}']"] == "weight"
        for kind in ("momentum", "master", "average"):
            assert roles[f"state['{kind}']['{name}']"] == "auxiliary"


def test_every_leaf_is_listed_once_in_the_users_words():
    arguments = everything()
    plan = plan_for(everything_step, *arguments)
    assert len(plan.leaves) == len(jax.tree.leaves(arguments))
    assert len({leaf.path for leaf in plan.leaves}) == len(plan.leaves)


def test_a_weight_that_only_the_metrics_read_with_the_batch_is_a_weight():
    """An average that is evaluated on the batch in the step has to be whole."""

    def step(state, batch):
        params, average = state
        gradients = jax.grad(loss)(params, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        average = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, params)
        return (params, average), loss(state[1], batch)

    plan = plan_for(step, (weights(0), weights(1)), batch())
    assert leaf_of(plan, "state[1]['w1']").role == "weight"


def test_roles_are_found_inside_loops():
    def step(state, batches):
        return jax.lax.scan(adam_step, state, batches)

    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), batch())
    plan = plan_for(step, adam_state(), stacked, batch_axis=1)
    assert leaf_of(plan, "state[0]['w1']").role == "weight"
    moments = [leaf for leaf in plan.leaves if leaf.path.startswith("state[1]") and leaf.path.endswith("['w1']")]
    assert len(moments) == 2 and all(leaf.role == "auxiliary" and leaf.layout == "split(0)" for leaf in moments)


# -- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("state['params']['w1']", "a weight: every replica reads it whole"),
        ("state['momentum']['w1']", "only the update uses it"),
        ("state['momentum']['b']", "small: 256 bytes, below min_shard_bytes=16384"),
        ("state['frozen']", "frozen: returned unchanged"),
        ("batch['x']", "the examples"),
        ("rate", "an input, not state"),
    ],
)
def test_reasons(path, reason):
    assert reason in leaf_of(plan_for(everything_step, *everything()), path).reason


def sgd_momentum(state, x):
    w, m = state
    m = 0.9 * m + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return (w - 0.1 * m, m), jnp.mean(x)


def test_a_leaf_that_does_not_divide_is_padded_and_says_so():
    w = jnp.ones((101, 103))
    plan = plan_for(sgd_momentum, (w, w), jnp.ones((16, 101)))
    found = leaf_of(plan, "state[1]")
    assert found.layout == "split(1, padded to 104)" and found.held == (101, 104)
    assert found.reason.endswith("padded by 0.96%")
    assert found.bytes_after == 101 * 13 * 4


def test_the_first_dimension_that_divides_is_split():
    w = jnp.ones((101, 104))
    found = leaf_of(plan_for(sgd_momentum, (w, w), jnp.ones((16, 101))), "state[1]")
    assert found.layout == "split(1)" and found.spec == PartitionSpec(None, "data")


@pytest.mark.parametrize(("least", "split"), [(BIG, True), (BIG + 1, False), (0, True)])
def test_min_shard_bytes(least, split):
    plan = plan_for(adam_step, adam_state(), batch(), options=shardstep.Options(min_shard_bytes=least))
    moments = [leaf for leaf in plan.leaves if leaf.role == "auxiliary" and leaf.path.endswith("['w1']")]
    assert [("split" in leaf.layout) for leaf in moments] == [split] * 2
    bias = [leaf for leaf in plan.leaves if leaf.role == "auxiliary" and leaf.path.endswith("['b']")]
    assert all(("split" in leaf.layout) == (least <= 256) for leaf in bias)


@pytest.mark.parametrize(
    ("weights", "layout", "why"),
    [("auto", "replicated", ""), ("replicated", "replicated", "as asked"), ("sharded", "split(0)", "as asked")],
)
def test_how_weights_rest(weights, layout, why):
    plan = plan_for(adam_step, adam_state(), batch(), weights=weights)
    assert leaf_of(plan, "state[0]['w1']").layout == layout
    assert plan.weights in ("replicated", "sharded") and why in plan.why_weights and plan.why_weights


# -- totals -----------------------------------------------------------------------------------------------------------


def test_bytes_before_and_after(adam_plan):
    moment = next(leaf for leaf in adam_plan.leaves if leaf.role == "auxiliary" and leaf.path.endswith("['w1']"))
    assert (moment.bytes_before, moment.bytes_after) == (BIG, BIG // 8)
    weight = leaf_of(adam_plan, "state[0]['w1']")
    assert weight.bytes_before == weight.bytes_after == BIG
    small = 3 * 64 * 4 + 4  # the biases and their moments, and Adam's count
    assert adam_plan.state_bytes.replicated == 6 * BIG + small
    assert adam_plan.state_bytes.sharded == 2 * BIG + 4 * BIG // 8 + small


def test_state_bytes_are_what_the_devices_hold():
    sharded = shardstep.shard(adam_step)
    state, _ = sharded(adam_state(), batch())
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert sharded.plan(state, batch()).state_bytes.sharded == held


def test_nothing_is_worse(adam_plan):
    assert adam_plan.wire_bytes.sharded <= adam_plan.wire_bytes.replicated
    assert adam_plan.update_flops.sharded < adam_plan.update_flops.replicated / 4
    assert adam_plan.auxiliary_share > 0.98


def test_one_replica_sends_nothing():
    plan = plan_for(adam_step, adam_state(), batch(), mesh=mesh_of(1))
    assert plan.replicas == 1 and plan.wire_bytes.sharded == 0


def test_collectives_say_what_they_are_for_and_where(adam_plan):
    scatters = [c for c in adam_plan.collectives if c.kind == "reduce-scatter"]
    assert sorted(shape for c in scatters for shape in c.shapes) == [(64, 96), (96, 64)]
    assert all(c.dtype == "float32" and c.axis == "data" and c.times == 1 and not c.loop for c in scatters)
    assert sum(c.bytes for c in scatters) == pytest.approx(2 * BIG * 7 / 8)
    assert all(c.purpose for c in adam_plan.collectives)
    # sent where the optimizer first reads the gradient; gathered where the step returns the weight
    assert all("optax" in c.line or "steps.py" in c.line for c in scatters)
    assert all(c.purpose == "output" for c in adam_plan.collectives if c.kind == "all-gather")


def test_an_average_is_divided_behind_its_sum(mesh):
    """As the step says it. (In front of the sum, the division would be work of its own for every small average.)"""

    def step(scale, x):
        mean = jnp.mean(x, 0)
        return scale + jnp.mean(jnp.tanh(x - mean) * scale, 0), mean

    planned = shardstep.shard(step, mesh, batch_argnums=1).plan(jnp.ones(32), jnp.ones((16, 32)))
    assert [c.purpose for c in planned.collectives] == ["div", "div"]


# -- to read and to keep ----------------------------------------------------------------------------------------------


def test_a_plan_reads_as_a_table(adam_plan):
    text = str(adam_plan)
    assert text.startswith("shardstep plan for 8 replicas, weights replicated")
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line.strip()}
    for leaf in adam_plan.leaves:
        assert leaf.role in rows[leaf.path] and leaf.layout in rows[leaf.path] and leaf.reason in rows[leaf.path]
    assert "x reduce-scatter float32, 42.0 KiB" in text
    header = next(line for line in text.splitlines() if line.split()[:1] == ["leaf"])
    column = header.index("role")
    assert all(rows[leaf.path][column:].startswith(leaf.role + " ") for leaf in adam_plan.leaves)


def test_json_holds_all_of_it(adam_plan):
    data = json.loads(adam_plan.to_json())
    assert set(data) >= {"replicas", "weights", "why_weights", "leaves", "collectives", "fallbacks"}
    assert data["state_bytes"] == {
        "replicated": adam_plan.state_bytes.replicated,
        "sharded": adam_plan.state_bytes.sharded,
    }
    assert set(data) >= {"wire_bytes", "update_flops"}
    assert len(data["leaves"]) == len(adam_plan.leaves) and len(data["collectives"]) == len(adam_plan.collectives)
    for written, leaf in zip(data["leaves"], adam_plan.leaves, strict=True):
        assert (written["path"], written["role"], written["reason"]) == (leaf.path, leaf.role, leaf.reason)
        assert tuple(written["shape"]) == leaf.shape and written["bytes_after"] == leaf.bytes_after
        assert written["spec"] == [None if part is None else part for part in leaf.spec]
    assert data["collectives"][0]["kind"] == adam_plan.collectives[0].kind


def test_json_of_a_mesh_of_two_axes():
    mesh = jax.make_mesh((2, 4), ("host", "chip"))
    data = json.loads(plan_for(adam_step, adam_state(), batch(), mesh=mesh).to_json())
    assert any(leaf["spec"] == [["host", "chip"]] for leaf in data["leaves"])


def test_a_plan_pickles(adam_plan):
    again = pickle.loads(pickle.dumps(adam_plan))
    assert again == adam_plan and str(again) == str(adam_plan) and again.to_json() == adam_plan.to_json()


def test_a_plan_is_frozen(adam_plan):
    with pytest.raises(AttributeError):
        adam_plan.replicas = 2


def test_shardings_have_the_shape_of_the_arguments(adam_plan):
    (state, examples), keywords = adam_plan.shardings
    assert jax.tree.structure(state) == jax.tree.structure(adam_state()) and keywords == {}
    assert state[0]["w1"].spec == PartitionSpec() and state[1][0].mu["w1"].spec == PartitionSpec("data")
    assert examples["x"].spec == PartitionSpec("data")


def test_shapes_only():
    abstract = jax.eval_shape(lambda: (adam_state(), batch()))
    assert plan_for(adam_step, *abstract) == plan_for(adam_step, adam_state(), batch())


def test_a_model_that_no_machine_could_hold():
    """Two terabytes of state, planned from shapes."""
    w = jax.ShapeDtypeStruct((2**19, 2**19), jnp.float32)
    plan = plan_for(sgd_momentum, (w, w), jax.ShapeDtypeStruct((16, 2**19), jnp.float32), weights="replicated")
    assert plan.state_bytes.replicated == 2 * 2**40
    assert plan.state_bytes.sharded == 2**40 + 2**37
    # 16 examples go where the weight is, if it is nowhere whole
    plan = plan_for(sgd_momentum, (w, w), jax.ShapeDtypeStruct((16, 2**19), jnp.float32))
    assert plan.weights == "sharded" and plan.state_bytes.sharded == 2 * 2**37
    assert plan.wire_bytes.sharded < 1e-3 * plan.wire_bytes.replicated


# -- fallbacks --------------------------------------------------------------------------------------------------------


def test_no_fallbacks_in_an_ordinary_step(adam_plan):
    assert adam_plan.fallbacks == () and "not sharded" not in str(adam_plan)


def test_a_sort_over_the_examples_is_reported_with_its_line():
    def step(state, batch):
        ranked = jnp.sort(batch["x"], axis=0)  # the examples are needed side by side
        return adam_step(state, {**batch, "x": ranked})

    plan = plan_for(step, adam_state(), batch())
    (fallback,) = [f for f in plan.fallbacks if f.primitive == "sort"]
    assert "split(0)" in fallback.why and "whole" in fallback.why
    assert f"test_plan.py:{step.__code__.co_firstlineno + 1}" in fallback.line
    assert fallback.bytes == pytest.approx(24 * 96 * 4 * 7 / 8)
    assert "not sharded" in str(plan) and "sort at" in str(plan)


def new_primitive(name):
    """One that shardstep has never seen: it doubles its operand."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: 2 * x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    return primitive


def doubling_step(primitive):
    def step(state, batch):
        return adam_step(state, {**batch, "x": primitive.bind(batch["x"])})

    return step


def test_an_unknown_primitive_is_gathered_for_and_reported():
    step = doubling_step(new_primitive("strange"))
    sharded = shardstep.shard(step)
    (fallback,) = sharded.plan(adam_state(), batch()).fallbacks
    assert fallback.primitive == "strange" and "no rule for this primitive" in fallback.why
    assert "test_plan.py" in fallback.line and fallback.bytes == pytest.approx(24 * 96 * 4 * 7 / 8)
    assert_same(sharded(adam_state(), batch()), jax.jit(step)(adam_state(), batch()))


def test_a_rule_can_be_taught(monkeypatch):
    monkeypatch.setattr(contract, "_RULES", dict(contract._RULES))  # other tests look at all rules
    primitive = new_primitive("taught")
    shardstep.register_rule(primitive, lambda site, placements: [Decision((s,), (s,)) for s in splits(placements)])
    step = doubling_step(primitive)
    sharded = shardstep.shard(step)
    plan = sharded.plan(adam_state(), batch())
    assert plan.fallbacks == ()
    assert not [c for c in plan.collectives if c.shape == (24, 96)]
    assert_same(sharded(adam_state(), batch()), jax.jit(step)(adam_state(), batch()))


# -- how long it takes, counted ---------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """`calls(name, plan)`: how often `plan()` calls that method of the planner's forward walk."""

    def count(name, plan):
        made, method = [], getattr(Forward, name)
        monkeypatch.setattr(Forward, name, lambda *args, **kwargs: (made.append(name), method(*args, **kwargs))[1])
        plan()
        monkeypatch.undo()
        return len(made)

    return count


def test_ten_times_as_many_leaves_take_no_more_decisions(calls):
    def decisions(weights):
        step, args = programs.many_leaves(weights)
        return calls("outcome", lambda: plan_for(step, *args))

    few, many = decisions(40), decisions(400)
    assert 0 < many == few


def test_what_is_decided_twice_is_looked_up(calls):
    """The replicated step, with which the batch is chosen, is what the plan is compared with."""
    step, args = programs.many_leaves(6)
    assert calls("run", lambda: plan_for(step, *args)) == 5  # one replica; replicated and sharded, twice each


def test_the_work_of_planning_grows_as_the_leaves_do(monkeypatch):
    """Counted in lines that run: what grows with the square of the leaves shows long before it takes time."""
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if event == "call":
            return count if "shardstep" in frame.f_code.co_filename else None
        lines += event == "line"  # each turn of a comprehension is one
        return count

    def counted(stage):
        def run(*args):
            before = sys.gettrace()
            sys.settrace(count)
            try:
                return stage(*args)
            finally:
                sys.settrace(before)

        return run

    def work(weights):
        nonlocal lines
        lines = 0
        step, args = programs.many_leaves(weights)
        plan_for(step, *args)
        return lines

    for stage in ("choose_batch", "decide", "describe"):
        monkeypatch.setattr(api, stage, counted(getattr(api, stage)))
    work(6)  # what is made on first use
    few, more, many = work(40), work(80), work(160)
    assert many - more == pytest.approx(2 * (more - few), rel=0.005)


def nested_loops(depth):
    """A step whose loss is `depth` loops inside one another."""

    def iterate(x, w, depth):
        if depth == 0:
            return jnp.tanh(x @ w)
        return jax.lax.scan(lambda x, _: (iterate(x, w, depth - 1), None), x, None, length=3)[0]

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean(iterate(x, w, depth) ** 2))(state["w"])
        moment = 0.9 * state["m"] + gradient
        return {"w": state["w"] - 0.1 * moment, "m": moment}, gradient.sum()

    weight = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return step, {"w": weight, "m": weight}, jax.ShapeDtypeStruct((64, 128), jnp.float32)


def test_a_loop_around_a_loop_adds_to_the_work_and_does_not_multiply_it(calls):
    two, three, four = (calls("run", lambda d=d: plan_for(*nested_loops(d))) for d in (2, 3, 4))
    assert four - three <= three - two + 2


def test_equations_of_a_library_inside_a_loop_have_the_users_line():
    """`jnp.diag` is traced by JAX, in a `jit` of its own: only the loop around it was written by the user."""

    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: y + jnp.diag(y).sum(), x)

    equations = list(flatten(jax.make_jaxpr(step)(jnp.eye(4))).walk())
    assert "gather" in {str(e.primitive) for e in equations}
    assert all("test_plan.py" in e.line for e in equations)
