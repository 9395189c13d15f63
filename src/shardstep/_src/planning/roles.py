"""What each input of a step is for, found by asking who meets the examples."""

from __future__ import annotations

from ..capture.step import Captured
from ..core.errors import ShardstepError
from ..core.layout import VARYING, Axis, Layout, Varying, whole
from ..core.program import Equation, Kinds, Program
from ..core.schedule import Schedule
from ..rules.parallel import AS_WRITTEN
from .placement import split_on
from .propagation.boundary import Boundary
from .propagation.forward import Forward
from .propagation.memo import Memo


def walk_unsharded(captured: Captured, kinds: Kinds) -> Schedule:
    """Who meets the examples, what would differ between replicas? Asked of one replica, which divides everything."""
    alone = (Axis(("replica",), 1),)
    examples = examples_of(captured, alone)
    inputs = [examples.get(i, whole(alone)) for i in range(len(captured.program.inputs))]
    drawn = drawn_of(captured, alone)
    outputs = (None,) * len(captured.program.outputs)
    boundary = Boundary(tuple(inputs), outputs, leaves_partial=True, notes_batch=True, drawn=drawn)
    return Forward(captured.program, alone, Memo(kinds), draws=bool(drawn)).run(boundary)


def roles_of(captured: Captured, unsharded: Schedule) -> list[str]:
    """A weight meets the examples; auxiliary state only meets the update; frozen state comes back as it went in."""
    frozen = captured.frozen

    def role(i: int) -> str:
        if i in captured.batch:
            return "batch"
        if i not in captured.state:
            return "input"
        if i in frozen:
            return "frozen"
        return "weight" if i in unsharded.met_batch else "auxiliary"

    return [role(i) for i in range(len(captured.program.inputs))]


def check_outputs(captured: Captured, unsharded: Schedule) -> None:
    """State that each replica would compute from its own batch alone is an error."""
    for i, o in captured.state.items():
        if i not in captured.batch and any(isinstance(p, Varying) for p in unsharded.outputs[o]):
            if sent := _sent_as_written(captured.program, o):
                raise ShardstepError(
                    f"the state leaf {captured.paths[i]} comes out of {sent.primitive} at {sent.line}, and nothing"
                    " shows that it is the same on all replicas. If it is, say so with"
                    f" lax.pmean(x, {captured.axis_name!r}), or reduce with lax.psum instead: only then can the update"
                    " be sharded."
                )
            raise ShardstepError(
                f"the state leaf {captured.paths[i]} would differ between replicas: the step computes it from one"
                f" replica's batch. Reduce it over the replicas, e.g. with lax.pmean(x, {captured.axis_name!r}); of"
                " running averages (BatchNorm), that is what averaging them later gives. To keep one for each replica,"
                " as under pmap, pass them stacked as an argument of their own, named among the batch with"
                " batch_axis=None."
            )


def examples_of(captured: Captured, axes: tuple[Axis, ...]) -> dict[int, Layout]:
    """The batch: split on its examples, or each replica's own in a per-replica step."""
    if captured.axis_name is not None:
        return dict.fromkeys(captured.batch, (VARYING,) * len(axes))
    inputs, all_axes = captured.program.inputs, (True,) * len(axes)
    return {i: split_on(inputs[i].array.shape, dim, axes, all_axes, batch=True) for i, dim in captured.batch.items()}


def drawn_of(captured: Captured, axes: tuple[Axis, ...]) -> tuple[tuple[int, Layout], ...]:
    """What the step makes itself and counts as examples: with so many rows, split like this."""
    all_axes = (True,) * len(axes)
    return tuple((rows, split_on((rows,), 0, axes, all_axes, batch=True)) for rows in captured.examples.drawn)


def _sent_as_written(program: Program, output: int) -> Equation | None:
    """The last collective before an output that may or may not make values the same on all replicas (a ring sum)."""
    reached = {program.outputs[output]}
    for equation in reversed(program.equations):
        if not reached.isdisjoint(equation.outputs):
            inside = (e for body in equation.bodies for e in body.walk())
            if sent := next((e for e in (equation, *inside) if e.primitive in AS_WRITTEN), None):
                return sent
            reached.update(equation.inputs)
    return None
