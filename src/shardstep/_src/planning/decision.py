"""Decide how a captured step runs: with which layouts at rest, in which schedule, by which engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..capture.step import Captured
from ..core import meshes, passes
from ..core.execution import Execution
from ..core.layout import Layout, Split, is_padded, show, whole
from ..core.options import Options, beyond_xla, moves_weights
from ..core.program import Atom
from ..core.schedule import Schedule
from ..core.user_shardings import Kept, alike
from ..machine.replicas import Replicas
from . import engines, host_memory, layers, ownership, summed_whole, visits
from . import weights as weights_at_rest
from .added_in_loops import added_in_loops
from .at_rest import ROOM, WHY_WHOLE, Policy, Taken, choose_weights, layout_at_rest, pads_state, take_turns
from .buckets import Limits, fuse
from .plan import Owned
from .precision import lossy, travel_in, wire_notes
from .problem import Attempt, Problem
from .propagation.boundary import Boundary
from .propagation.forward import schedule
from .propagation.memo import Memo
from .roles import drawn_of, examples_of


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
    """The fastest of the programs that fit: the update's expensive work repeated, owned or split inside."""
    captured, replicas = problem.captured, problem.replicas
    variants = [_Variant.of("repeated", problem, weights)]
    stacked = ownership.stacked(captured, problem.unsharded, replicas)
    if stacked is not captured:
        variants.append(_Variant.of("owned", replace(problem, captured=stacked), weights))
    best = min(variants, key=_Variant.rank)
    if _may_split_inside(problem) and ownership.waits(best.attempt.schedule, variants[0].attempt.schedule, replicas):
        memo = Memo(problem.memo.kinds, ownership.price_inside(replicas), problem.memo.sums_at_once)
        inside = [_Variant.of(ownership.INSIDE, replace(problem, memo=memo), weights)]
        if stacked is not captured and ownership.alone(stacked, problem.unsharded):
            owning = replace(problem, captured=stacked, memo=memo)
            inside.append(_Variant.of(ownership.OWNED_OR_INSIDE, owning, weights))
        variants += [
            v for v in inside if v.attempt.sends_little or v.seconds < ownership.WORTH_MORE_BYTES * best.seconds
        ]
        best = min(variants, key=_Variant.rank)
    decided = _with_engine(best.attempt)
    if decided.engine.engine != "rewrite" or len(variants) == 1:
        return decided
    ways = [variant.way for variant in variants]
    taken = ways[variants.index(best)]
    return replace(decided, owned=ownership.owners(ways, taken, problem.unsharded, replicas))


def _may_split_inside(problem: Problem) -> bool:
    """Not if the order of sums is fixed, nor if the user has laid out state along axes of their own."""
    return not problem.options.deterministic and not any(problem.captured.kept)


@dataclass(frozen=True, eq=False)
class _Variant:
    """The step with the expensive work of its update done in one way."""

    name: str
    captured: Captured
    attempt: Attempt

    @classmethod
    def of(cls, name: str, problem: Problem, weights: str) -> _Variant:
        return cls(name, problem.captured, _chosen(problem, weights))

    @functools.cached_property
    def seconds(self) -> float:
        return ownership.seconds(self.attempt.schedule, self.attempt.problem.replicas)

    def rank(self) -> tuple[bool, float]:
        return not self.attempt.fits, self.seconds

    @property
    def way(self) -> ownership.Way:
        return ownership.Way(self.name, self.captured, self.attempt.schedule, self.seconds)


def _chosen(problem: Problem, weights: str) -> Attempt:
    """The step with its weights at rest as asked, or in the way that is predicted to be fastest of those that fit."""
    options, replicas = problem.options, problem.replicas
    auto = weights == "auto"

    def planned(resting: str, why: str) -> Attempt:
        return layers.chosen(problem, layers.Resting(resting, why, auto), _attempt)

    chosen = planned(*choose_weights(weights, options, replicas.topology.platform))
    if auto and options.gather_dtype is None and options.wire is None:
        chosen = weights_at_rest.reconsidered(chosen, planned)
    return chosen


def _attempt(problem: Problem, weights: str, why_weights: str) -> Attempt:
    """With padding where that is needed; without most of it, if it is padding that makes the step send more.

    Where a replica has few examples, they may go to the weights, if that is predicted to be faster.
    """

    def under(policy: Policy) -> Attempt:
        return Attempt(problem, *_scheduled(problem, policy), weights, why_weights)

    policy = Policy(weights, problem.small)
    found = under(policy)
    if not problem.sends_no_more(found.schedule) and pads_state(problem.captured, found.schedule):
        roomy = replace(policy, room=ROOM)
        other = under(roomy)
        if problem.sends_no_more(other.schedule):
            policy, found = roomy, other
    if summed := _summed_anyway(found):
        whole_there = replace(policy, summed=summed)
        other = under(whole_there)
        if other.fits >= found.fits and other.peak <= (1 + summed_whole.ROOM) * found.peak:
            policy, found = whole_there, other
    if moves_weights(problem.options) or not visits.may_pay(found.schedule):
        return found
    other = under(replace(policy, visits=True))
    if not visits.worth(other, found):
        return found
    why = visits.why(other.schedule, other.seconds, found.seconds)
    return replace(other, why_weights=f"{other.why_weights}; {why}")


def _summed_anyway(found: Attempt) -> summed_whole.Summed:
    """Where the compiler would not scatter, if the step sends more than the replicated one for it."""
    cut = summed_whole.cut_inside(found.schedule)
    more, replicated = sum(cut.values()), engines.sent(found.problem.baseline)
    worth = summed_whole.WORTH * replicated
    return cut.keys() if more > worth and found.sent + more > replicated + worth else frozenset()


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
    limits = Limits.of(options.bucket_bytes, replicas.topology)
    resting = take_turns(captured, replicas, problem.roles, resting, limits.bytes, problem.sliced)
    examples = examples_of(captured, axes)
    inputs = [examples.get(i, layout) for i, (layout, _) in enumerate(resting)]
    outputs: list[Layout | None] = [None] * len(program.outputs)
    for i, o in captured.state.items():
        outputs[o] = inputs[i]
    boundary = Boundary(tuple(inputs), tuple(outputs), visits=policy.visits, drawn=drawn_of(captured, axes))
    reasons = tuple(_why(captured, i, reason) for i, (_, reason) in enumerate(resting))
    shown = [f"{show(layout)}, {reason}" for layout, reason in zip(inputs, reasons, strict=True)]
    passes.leave(f"at rest (weights {policy.weights})", dict(zip(captured.paths, shown, strict=True)))
    decided = passes.leave("propagation", schedule(program, axes, boundary, problem.memo))
    decided = passes.leave("precision", travel_in(decided, options))
    decided = passes.leave("buckets", fuse(decided, limits, in_order=bool(problem.why_hosted)))
    added = decided if options.deterministic else added_in_loops(decided)
    if added is not decided:
        passes.leave("added in loops", added)
    return added, _with_updates(captured, added, reasons)


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
        owned=ownership.saved(decided, problem.baseline, replicas),
        asks=beyond_xla(problem.options) or layers.beyond_xla(chosen),
    )
