"""Any step, sharded, gives the numbers of the plain step: random programs against `jax.jit` (`make fuzz` tries more).

A few fixed ones here, so that a red run is red for everybody; Hypothesis shrinks what fails.
"""

from __future__ import annotations

import equations
import whole_steps
from choices import Dice, simplified
from hypothesis import assume, event, given, settings

import shardstep

# One example is one program: three of the profile's worth make 6 programs of each kind, 60 for `make test-all`.
many = settings(max_examples=3 * settings().max_examples)


@many
@given(program=whole_steps.programs("state"))
def test_any_state_and_metrics(program):
    agrees(program)


@many
@given(program=whole_steps.programs("training"))
def test_gradients_and_updates(program):
    agrees(program)


@many
@given(program=whole_steps.programs("optimizer"))
def test_optimizers(program):
    agrees(program)


@many
@given(program=whole_steps.programs("replica"))
def test_steps_per_replica(program):
    agrees(program)


def agrees(program: whole_steps.Program) -> None:
    try:
        assert not whole_steps.disagreements(program)
    except whole_steps.Unwritable:
        assume(False)
    except shardstep.ShardstepError as refusal:
        assert "internal error" not in str(refusal)
        event("refused")


def test_equations_played_by_hand():
    played = equations.Played()
    for seed in range(2):
        equations.play(Dice(seed), played)
    assert played.plays > 100 and played.on_two_axes and played.padded


def test_a_failing_program_is_made_smaller():
    """The search for a smaller program keeps what makes it fail, and finds the smallest list that has it."""
    made = [5, 3, 9, 1, 7, 9, 2]
    assert simplified(made, lambda made: made.count(9) >= 1) == [9]


def test_the_fuzzer_notices_a_wrong_number(monkeypatch):
    """A step that returns something else, or tells the host something else, is found."""
    kind, right = "state", None
    for seed in range(20):
        program = whole_steps.write(Dice(seed), kind)
        if not program.dialect.odd and program.setting.replicas > 1:
            right = program
            break
    assert right is not None and not whole_steps.disagreements(right)
    sharded = whole_steps.Program.sharded

    def spoiled(self):
        step = sharded(self)

        def run(state, *batch):
            state, metrics = step(state, *batch)
            return state | {"w0": state["w0"] * 1.01}, metrics

        return run

    monkeypatch.setattr(whole_steps.Program, "sharded", spoiled)
    assert any("w0" in where for where in whole_steps.disagreements(right))
