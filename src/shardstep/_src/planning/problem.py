"""A step to be planned, and one way to lay out its state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from ..capture.casts_in_front import casts_in_front
from ..capture.step import Captured
from ..core import passes
from ..core.layout import joined
from ..core.options import Options
from ..core.schedule import Schedule
from ..machine.memory import memory_limit
from ..machine.replicas import Replicas
from . import engines
from .at_rest import small_bytes
from .batch_choice import replicated
from .estimate import Estimate, estimate
from .host_memory import hosted, leaf_by_leaf
from .precision import check_order
from .propagation.in_loops import InLoops
from .propagation.memo import Memo
from .propagation.price import Price
from .roles import check_outputs, roles_of, walk_unsharded
from .sliced import sliced_dims


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
        known = memo if shared else Memo(memo.kinds, Price.of(replicas.topology.rings), options.deterministic)
        sliced = sliced_dims(captured.program, captured.state)
        memory = memory_limit(replicas, options.memory, options.topology)
        return cls(captured, replicas, options, unsharded, roles, small, sliced, baseline, known, memory)

    def hosting(self, why: str) -> Problem:
        """The same with optimizer state in host memory, updated leaf by leaf."""
        program = passes.leave("leaf by leaf", leaf_by_leaf(self.captured, self.roles, self.small))
        memo = Memo(self.memo.kinds, Price.together(self.replicas.topology.rings))
        found = Problem.of(replace(self.captured, program=program), self.replicas, self.options, memo)
        return replace(found, why_hosted=why)

    def with_loops(self, how: InLoops) -> Problem:
        """The same with loops that hold more, or less; what they gather once, in the dtype in which it is read."""
        captured, memo = self.captured, self.memo
        if how != memo.in_loops:
            memo = Memo(memo.kinds, memo.price, memo.sums_at_once, how)
        if not how.streams:
            program = casts_in_front(captured.program, None if how.gathers_once else ())
            if program is not captured.program:
                captured = replace(captured, program=passes.leave("casts in front", program))
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

    @property
    def sends_little(self) -> bool:
        """No more than the replicated step and whole matrices on their way to owners and back."""
        room = 1 + 2 / self.problem.replicas.count
        return engines.enough(self.sent, room * engines.sent(self.problem.baseline))
