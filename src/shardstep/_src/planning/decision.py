"""Decide how a captured step runs: with which layouts at rest, in which schedule, by which engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from ..capture.casts_in_front import casts_in_front
from ..capture.step import Captured
from ..core import meshes, passes
from ..core.execution import Execution
from ..core.layout import Layout, Split, is_padded, joined, show, whole
from ..core.options import Options, beyond_xla
from ..core.program import Atom
from ..core.schedule import Schedule
from ..core.user_shardings import Kept, alike
from ..machine.memory import memory_limit
from ..machine.replicas import Replicas
from . import engines, host_memory, ownership
from .at_rest import ROOM, WHY_WHOLE, Policy, Taken, choose_weights, layout_at_rest, pads_state, small_bytes, take_turns
from .batch_choice import replicated
from .buckets import bucket_bytes, fuse
from .estimate import Estimate, estimate
from .formatting import duration, size
from .host_memory import hosted, leaf_by_leaf
from .plan import Owned
from .precision import check_order, lossy, travel_in, wire_notes
from .propagation.boundary import Boundary
from .propagation.forward import schedule
from .propagation.memo import Memo
from .roles import check_outputs, drawn_of, examples_of, roles_of, walk_unsharded
from .sliced import sliced_dims


@dataclass(frozen=True, eq=False)
class Decided:
    """All that was decided: `execution` is how the step runs, `describe` makes a Plan of it."""

    schedule: Schedule
    baseline: Schedule  # of the program that everyone runs today
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    roles: tuple[str, ...]  # of the inputs
    reasons: tuple[str, ...]
    weights: str
    why_weights: str
    kept: Mapping[Atom, Kept]  # of the values that are laid out as some state is, along the user's own axes
    engine: engines.Choice
    wire_bytes: float
    donated: Mapping[int, int]  # the outputs that may be written over an input, and over which
    memory: int | None  # bytes that a device may use
    peak: int | None  # bytes per device, predicted; None: without a limit it need not be known
    fits: bool  # is that within the limit?
    lossy: str = ""  # what is rounded on the wire, where the user asked for that
    notes: tuple[str, ...] = ()
    owned: tuple[Owned, ...] = ()  # whole matrices that the update needs, and who has them
    hosted: Mapping[int, int] = field(default_factory=dict)  # inputs in host memory -> the outputs that replace them
    why_hosted: str = ""

    @property
    def execution(self) -> Execution:
        """What the runtime needs to know."""
        return Execution(self.engine.engine, self.schedule, self.inputs, self.outputs, self.kept, self.hosted)


@dataclass(frozen=True, eq=False)
class Problem:
    """A step to be planned, and what is known of it before anything is decided."""

    captured: Captured
    replicas: Replicas
    options: Options
    unsharded: Schedule  # on one replica: who meets the examples?
    roles: tuple[str, ...]  # of the inputs
    small: int  # leaves of fewer bytes are whole at rest
    sliced: Mapping[int, AbstractSet[int]]  # the dimensions along which loops take inputs slice by slice
    baseline: Schedule  # of the program that everyone runs today
    memo: Memo
    memory: int | None  # bytes that a device may use
    why_hosted: str = ""  # why optimizer state rests in host memory; empty: it does not

    @classmethod
    def of(cls, captured: Captured, replicas: Replicas, options: Options, memo: Memo) -> Problem:
        """`memo`: of all replicas as one axis. The program that everyone runs today speaks of these."""
        unsharded = walk_unsharded(captured, memo.kinds)
        check_outputs(captured, unsharded)
        roles = tuple(roles_of(captured, unsharded))
        passes.leave("roles", dict(zip(captured.paths, roles, strict=True)))
        small = small_bytes(captured, roles, replicas, options)
        check_order(options, captured.axis_name, replicas)
        together = (joined(replicas.axes),)
        baseline = replicated(captured, together, memo)
        shared = together == replicas.axes and not options.deterministic
        known = memo if shared else Memo(memo.kinds, sums_at_once=options.deterministic)
        sliced = sliced_dims(captured.program, captured.state)
        memory = memory_limit(replicas, options.memory, options.topology)
        return cls(captured, replicas, options, unsharded, roles, small, sliced, baseline, known, memory)

    def hosting(self, why: str) -> Problem:
        """The same with optimizer state in host memory, updated leaf by leaf."""
        program = passes.leave("leaf by leaf", leaf_by_leaf(self.captured, self.roles, self.small))
        found = Problem.of(replace(self.captured, program=program), self.replicas, self.options, Memo(self.memo.kinds))
        return replace(found, why_hosted=why)

    def gathering_once(self) -> Problem:
        """The same with scanned layers gathered in front of their loops, in the dtype in which they are read."""
        program = passes.leave("casts in front", casts_in_front(self.captured.program))
        captured = replace(self.captured, program=program)
        memo = Memo(self.memo.kinds, self.memo.sums_at_once, gathers_once=True)
        return replace(self, captured=captured, memo=memo)

    @property
    def donated(self) -> Mapping[int, int]:
        """The outputs that may be written over an input, and over which."""
        given = frozenset(self.captured.donated if self.options.donate else ())
        return {o: i for i, o in self.captured.state.items() if i in given}

    def sends_no_more(self, decided: Schedule) -> bool:
        """Than the replicated step."""
        return engines.enough(engines.sent(decided), engines.sent(self.baseline))


@dataclass(frozen=True, eq=False)
class Attempt:
    """The step with its state laid out in one way."""

    problem: Problem
    schedule: Schedule
    reasons: tuple[str, ...]  # why each input is laid out as it is
    weights: str
    why_weights: str

    @functools.cached_property
    def hosted(self) -> Mapping[int, int]:
        """The inputs in host memory, with the outputs that replace them."""
        problem = self.problem
        return hosted(problem.captured, problem.roles, self.schedule.inputs) if problem.why_hosted else {}

    @functools.cached_property
    def estimate(self) -> Estimate:
        replicas = self.problem.replicas
        return estimate(self.schedule, self.problem.donated, replicas.axes, replicas.topology, self.hosted)

    @property
    def peak(self) -> int:
        """Bytes per device, predicted."""
        return self.estimate.memory.peak

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return self.estimate.seconds.total

    @property
    def fits(self) -> bool:
        """Without a limit the peak need not be known."""
        return self.problem.memory is None or self.peak <= self.problem.memory

    @property
    def sent(self) -> float:
        return engines.sent(self.schedule)


def decide(captured: Captured, replicas: Replicas, weights: str, options: Options, memo: Memo) -> Decided:
    """Plan a captured step. Optimizer state goes to host memory if that was asked for, or if nothing else fits.

    `memo`: of all replicas as one axis, from the choice of the batch.
    """
    problem = Problem.of(captured, replicas, options, memo)
    why_not = host_memory.why_not(options, replicas)
    if options.offload:
        found = _decided(problem if why_not else problem.hosting("as asked"), weights)
        return replace(found, why_hosted=why_not) if why_not else found
    found = _decided(problem, weights)
    if found.fits:
        return found
    if why_not:
        return replace(found, why_hosted=why_not)
    other = _decided(problem.hosting(host_memory.NEEDED), weights)
    return other if other.hosted and (other.peak or 0) < (found.peak or 0) else found


def _decided(problem: Problem, weights: str) -> Decided:
    """The faster of two programs that fit: equal work on matrices owned, or repeated by every replica."""
    captured, replicas = problem.captured, problem.replicas
    chosen = _chosen(problem, weights)
    stacked = ownership.stacked(captured, problem.unsharded, replicas)
    if stacked is captured:
        return _with_engine(chosen)
    owning = replace(problem, captured=stacked)
    other = _chosen(owning, weights)
    times = [ownership.seconds(attempt.schedule, replicas) for attempt in (other, chosen)]
    taken = other.fits >= chosen.fits and (times[0] < times[1] or not chosen.fits)
    owned = ownership.owners(other.schedule, taken, *times)
    decided = _with_engine(other if taken else chosen)
    return replace(decided, owned=owned if decided.engine.engine == "rewrite" else ())


def _chosen(problem: Problem, weights: str) -> Attempt:
    """The step with its weights at rest as asked, or as the platform and the bytes on the wire suggest."""
    options, replicas = problem.options, problem.replicas
    chosen = _attempt(problem, *choose_weights(weights, options, replicas.topology.platform))
    once = options.layers == "once" or (weights == "auto" and problem.memory is not None and options.layers is None)
    if once and chosen.weights == "sharded" and _gathers_layers(chosen.schedule):
        chosen = _gathered_once(chosen, options.layers == "once")
    if weights == "auto" and options.gather_dtype is None and options.wire is None:
        chosen = _reconsidered(problem, chosen)
    return chosen


def _gathered_once(chosen: Attempt, asked: bool) -> Attempt:
    """With all scanned layers gathered in front of their loops, if that was asked for, or if it fits and is faster."""
    why = "as asked" if asked else "there is memory for all of them, and it is predicted to be faster"
    told = f"{chosen.why_weights}; scanned layers are gathered once, before their loops ({why})"
    once = _attempt(chosen.problem.gathering_once(), chosen.weights, told)
    return once if asked or (once.fits and once.seconds < chosen.seconds) else chosen


def _gathers_layers(schedule: Schedule) -> bool:
    """Does a loop gather in its iterations?"""
    return any(c.kind == "all-gather" and c.loop and c.times > 1 for c in schedule.collectives)


def _reconsidered(problem: Problem, chosen: Attempt) -> Attempt:
    """What "auto" takes, given the layout that suits the platform: another, if that sends less or is what fits."""
    if chosen.fits and not _is_doubtful(chosen, problem.baseline):
        return chosen
    instead, why, margin = _INSTEAD[chosen.weights]
    other = _attempt(problem, instead, why)
    if chosen.fits and other.sent >= margin * chosen.sent:
        return chosen
    if chosen.fits and other.fits:
        return other if other.seconds <= chosen.seconds or instead == "sharded" else _noting(chosen, _slower(other))
    if chosen.fits:
        return _noting(chosen, _larger(other))
    if other.peak >= chosen.peak:
        return _noting(chosen, _larger(other))
    return replace(other, why_weights=_larger(chosen))


def _noting(chosen: Attempt, why_not: str) -> Attempt:
    return replace(chosen, why_weights=f"{chosen.why_weights}; {why_not}")


def _larger(other: Attempt) -> str:
    limit = size(other.problem.memory or 0)
    return f"memory: {other.weights} weights would need {size(other.peak)} of {limit} per device"


def _slower(other: Attempt) -> str:
    return f"{other.weights} weights would send less, but the step is predicted to take {duration(other.seconds)}"


def _attempt(problem: Problem, weights: str, why_weights: str) -> Attempt:
    """With padding where that is needed; without most of it, if it is padding that makes the step send more."""

    def under(policy: Policy) -> Attempt:
        return Attempt(problem, *_scheduled(problem, policy), weights, why_weights)

    found = under(Policy(weights, problem.small))
    if problem.sends_no_more(found.schedule) or not pads_state(problem.captured, found.schedule):
        return found
    other = under(Policy(weights, problem.small, ROOM))
    return other if problem.sends_no_more(other.schedule) else found


def _scheduled(problem: Problem, policy: Policy) -> tuple[Schedule, tuple[str, ...]]:
    """The step scheduled under a policy, and why each input is laid out as it is."""
    captured, replicas, options = problem.captured, problem.replicas, problem.options
    program, axes = captured.program, replicas.axes
    uses = program.uses
    resting = []
    for i, (var, role) in enumerate(zip(program.inputs, problem.roles, strict=True)):
        # frozen state that the update alone reads
        updating = role == "frozen" and uses[var] > 1 and i not in problem.unsharded.met_batch
        taken = Taken(captured.kept[i], problem.sliced.get(i, frozenset()))
        resting.append(layout_at_rest(var.array, "auxiliary" if updating else role, replicas, policy, taken))
    alone = bucket_bytes(options.bucket_bytes, replicas.topology.platform)
    resting = take_turns(captured, replicas, problem.roles, resting, alone, problem.sliced)
    examples = examples_of(captured, axes)
    inputs = [examples.get(i, layout) for i, (layout, _) in enumerate(resting)]
    outputs: list[Layout | None] = [None] * len(program.outputs)
    for i, o in captured.state.items():
        outputs[o] = inputs[i]
    boundary = Boundary(tuple(inputs), tuple(outputs), drawn=drawn_of(captured, axes))
    reasons = tuple(_why(captured, i, reason) for i, (_, reason) in enumerate(resting))
    shown = [f"{show(layout)}, {reason}" for layout, reason in zip(inputs, reasons, strict=True)]
    passes.leave(f"at rest (weights {policy.weights})", dict(zip(captured.paths, shown, strict=True)))
    decided = passes.leave("propagation", schedule(program, axes, boundary, problem.memo))
    decided = passes.leave("precision", travel_in(decided, options))
    decided = fuse(decided, alone, in_order=bool(problem.why_hosted))
    return passes.leave("buckets", decided), _with_updates(captured, decided, reasons)


def _why(captured: Captured, i: int, reason: str) -> str:
    if i in captured.examples.each:
        return "one for each replica, as under pmap"
    asked = i in captured.batch and captured.examples.why
    return f"{reason} ({asked})" if asked else reason


def _with_updates(captured: Captured, decided: Schedule, reasons: Sequence[str]) -> tuple[str, ...]:
    """Why weights are whole at rest, and what that means for their updates."""
    moved = (t for bundles in decided.transfers for bundle in bundles for t in bundle)
    shared = {t.var for t in moved if any(isinstance(p, Split) for p in t.source)}
    updated = {i for i, o in captured.state.items() if captured.program.outputs[o] in shared}
    return tuple(
        f"{reason}; its update is sharded and gathered" if reason == WHY_WHOLE and i in updated else reason
        for i, reason in enumerate(reasons)
    )


def _with_engine(chosen: Attempt) -> Decided:
    """The attempt as the better engine runs it."""
    problem, decided = chosen.problem, chosen.schedule
    captured = problem.captured
    everywhere = whole(decided.axes)
    unpadded = tuple(engines.unpadded(layout, everywhere) for layout in decided.inputs)
    question = _question(problem, chosen, shares=any(unpadded[i] != everywhere for i in captured.state))
    choice = engines.choose(problem.options.engine, question)
    if chosen.hosted and choice.engine == "annotate":
        choice = engines.Choice("rewrite", "optimizer state streams through the update from host memory")
    inputs, outputs, reasons = decided.inputs, decided.outputs, chosen.reasons
    if choice.engine == "annotate":
        changed = zip(reasons, inputs, unpadded, strict=True)
        reasons = tuple(r if a == b else f"{r}; XLA does not pad" for r, a, b in changed)
        inputs = unpadded
        resting = {o: inputs[i] for i, o in captured.state.items()}
        outputs = tuple(resting.get(o, everywhere) for o in range(len(captured.program.outputs)))
    rewritten = choice.engine == "rewrite"
    return Decided(
        schedule=decided,
        baseline=problem.baseline,
        inputs=inputs,
        outputs=outputs,
        roles=problem.roles,
        reasons=reasons,
        weights=chosen.weights,
        why_weights=chosen.why_weights,
        kept=alike(captured.program, captured.kept),
        engine=choice,
        wire_bytes=question.annotated if choice.engine == "annotate" else question.rewritten,
        donated=problem.donated,
        memory=problem.memory,
        peak=None if problem.memory is None else chosen.peak,
        fits=chosen.fits,
        lossy=lossy(decided, problem.options) if rewritten else "",
        notes=wire_notes(decided, problem.options) if rewritten else (),
        hosted=chosen.hosted,
        why_hosted=problem.why_hosted,
    )


def _question(problem: Problem, chosen: Attempt, shares: bool) -> engines.Question:
    """What the choice of an engine depends on."""
    captured, replicas, decided = problem.captured, problem.replicas, chosen.schedule
    inputs = zip(captured.program.inputs, problem.roles, strict=True)
    updated = [v.array for v, role in inputs if role == "weight" and v.array.nbytes >= problem.small]
    replicated = engines.sent(problem.baseline)
    return engines.Question(
        rewritten=chosen.sent,
        replicated=replicated,
        # if nothing is sharded, XLA runs the replicated step
        annotated=engines.estimate(problem.baseline, decided, updated, replicas.count) if shares else replicated,
        axis_name=captured.axis_name,
        uneven=any(is_padded(p) for i in captured.batch for p in decided.inputs[i]),
        shares=shares,
        explicit=meshes.explicit(replicas.user_mesh) is not None,
        alone=replicas.count == 1
        and problem.options.gather_dtype is None
        and not problem.options.deterministic,  # one replica rounds as well
        owned=ownership.saved(decided, replicas),
        asks=beyond_xla(problem.options),
    )


def _is_doubtful(chosen: Attempt, baseline: Schedule) -> bool:
    """Might weights that are laid out otherwise send less?"""
    if chosen.weights == "sharded":
        return chosen.sent > engines.ENOUGH * engines.sent(baseline)
    return any(step.ruling.visit for step in chosen.schedule.steps)


# What "auto" takes instead, why, and how much less that must send.
_INSTEAD = {
    "sharded": ("replicated", "to gather them in the step would send more", 1.0),
    "replicated": ("sharded", "the examples read few rows of a table, which then never moves", 0.5),
}
