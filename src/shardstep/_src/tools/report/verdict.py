"""The answer before the details: does it fit, what is kept and sent, what it costs, what was not sharded.

The same sentences head the terminal's report and the page. What is worse than the replicated step comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...planning.formatting import duration, size
from .summary import left_to_xla, short_line

if TYPE_CHECKING:
    from ...planning.plan import Leaf, Plan
    from ...planning.programs import Total

STATE = ("weight", "auxiliary", "frozen")
LENGTH = 70  # of a sentence, beside its topic in 80 columns
_MOST = 8  # sentences, beside the verdict itself
_SAME = 0.005  # a difference that nobody would notice
_SMALL = 0.01  # of the state: what stays whole and is smaller needs no explanation of its own


@dataclass(frozen=True)
class Sentence:
    """One line of the verdict: a topic, and what there is to say about it."""

    topic: str
    text: str
    worse: bool = False  # than the replicated step, or than the device can hold

    @property
    def line(self) -> str:
        """What fits on a line of a terminal; the page says the rest. What is worse is never cut off."""
        return self.text if self.worse or len(self.text) <= LENGTH else f"{self.text[: LENGTH - 3].rstrip(' ,:;(')}..."


def verdict(plan: Plan) -> list[Sentence]:
    """At most nine sentences of one line each (an 8-bit wire is told at length), the worst first."""
    if plan.replicas == 1:
        return [Sentence("Verdict", "one replica: there is nothing to share, so the step runs as it is"), *_fit(plan)]
    parts = (_fit, _precision, _totals, _host, _times, _weights, _whole, _fallbacks)
    found = [sentence for part in parts for sentence in part(plan)]
    if len(found) > _MOST:
        found = [sentence for sentence in found if not sentence.text.startswith("nothing")]
    return [_headline(plan, found), *sorted(found, key=lambda s: not s.worse)]


def _headline(plan: Plan, found: list[Sentence]) -> Sentence:
    worse = [s.topic.lower() for s in found if s.worse]
    if worse and _only_sharded_fits(plan):
        return Sentence("Verdict", "fits, which the replicated step does not; what that costs comes first")
    if worse:
        but = f"; but {_saved(plan)}" if plan.state_bytes.ratio < 1 - _SAME else ""
        return Sentence("Verdict", f"worse than the replicated step: {' and '.join(worse)}{but}", True)
    if not any(_split(leaf) for leaf in plan.leaves if leaf.role in STATE):
        return Sentence("Verdict", "nothing is sharded: the step runs as replicated data parallelism")
    sent = "the same communication" if _same(plan.wire_bytes) else "less communication"
    return Sentence("Verdict", f"{_saved(plan)} per device with {sent}")


def _saved(plan: Plan) -> str:
    return f"{plan.state_bytes.replicated / max(plan.state_bytes.sharded, 1):.1f}x less state"


def _only_sharded_fits(plan: Plan) -> bool:
    return plan.memory is not None and plan.fits and plan.peak_bytes.replicated > plan.memory


def _fit(plan: Plan) -> Iterator[Sentence]:
    """Does the step fit?"""
    peak, memory = plan.peak_bytes, plan.memory
    before = f"; replicated {size(peak.replicated)}" if plan.replicas > 1 else ""
    if memory is None:
        yield Sentence("Memory", f"predicted peak {size(peak.sharded)} per device{before}")
    elif plan.fits:
        before += "" if peak.replicated <= memory else " (does not fit)"
        yield Sentence("Fits", f"predicted peak {size(peak.sharded)} of {size(memory)}{before}")
    else:
        text = f"predicted peak {size(peak.sharded)}, and a device has {size(memory)}{before}"
        yield Sentence("Too large", text, True)


def _precision(plan: Plan) -> Iterator[Sentence]:
    if plan.lossy:
        yield Sentence("Precision", plan.lossy, True)


def _totals(plan: Plan) -> Iterator[Sentence]:
    weights = sum(leaf.bytes_after for leaf in plan.leaves if leaf.role in ("weight", "frozen"))
    parts = f", of which weights {size(weights)}" if weights else ""
    yield Sentence("Kept", f"per device {_change(plan.state_bytes)}{parts}", _more(plan.state_bytes))
    note = ", an estimate: XLA chooses" if plan.engine == "annotate" else ""
    yield Sentence("Sent", f"per device and step {_change(plan.wire_bytes)}{note}", _more(plan.wire_bytes))


def _host(plan: Plan) -> Iterator[Sentence]:
    if plan.host_bytes:
        yield Sentence("Host", f"{size(plan.host_bytes)} per device in host memory ({plan.why_offload})")


def _times(plan: Plan) -> Iterator[Sentence]:
    step, update, wire = plan.step_seconds, plan.update_seconds, plan.wire_seconds
    shares = f"update {_share(update.sharded, step.sharded)}, wire {_share(wire.sharded, step.sharded)}"
    text = f"predicted {duration(step.replicated)} -> {duration(step.sharded)}, of which {shares}"
    yield Sentence("Step", text, _more(step))


def _share(part: float, whole: float) -> str:
    return f"{min(part / whole, 1.0):.0%}" if whole else "none"


def _weights(plan: Plan) -> Iterator[Sentence]:
    yield Sentence("Weights", f"{plan.weights} at rest ({plan.why_weights})")
    if left := left_to_xla(plan):
        yield Sentence("Engine", left)


def _whole(plan: Plan) -> Iterator[Sentence]:
    """State that could be shared and is not."""
    whole = [leaf for leaf in plan.leaves if leaf.role == "auxiliary" and not _split(leaf)]
    nbytes, total = sum(leaf.bytes_after for leaf in whole), plan.state_bytes.replicated
    if not whole:
        yield Sentence("Whole", "nothing: all of the optimizer state is sharded")
        return
    largest = max(whole, key=lambda leaf: leaf.bytes_after)
    leaves = "1 leaf" if len(whole) == 1 else f"{len(whole)} leaves"
    why = "all small" if nbytes <= _SMALL * total else largest.reason.split(":")[0]
    yield Sentence("Whole", f"{leaves} of optimizer state, {size(nbytes)} in all ({why})")


def _fallbacks(plan: Plan) -> Iterator[Sentence]:
    if plan.engine == "annotate":
        return
    if not plan.fallbacks:
        yield Sentence("Gathered", "nothing: every operation of the update runs on shards")
        return
    first = max(plan.fallbacks, key=lambda f: f.bytes)
    more = f" and {len(plan.fallbacks) - 1} more" if len(plan.fallbacks) > 1 else ""
    sent = size(sum(f.bytes for f in plan.fallbacks))
    line = short_line(first.line).split(" ")[0]
    yield Sentence("Gathered", f"{sent} for {first.primitive} at {line}{more}, which runs on whole arrays")


def _split(leaf: Leaf) -> bool:
    return "split" in leaf.layout


def _change(total: Total) -> str:
    before, after = size(total.replicated), size(total.sharded)
    share = f"{total.ratio:.0%}" if total.ratio >= 0.01 else f"{total.ratio:.1%}"
    if before == after and not _same(total):
        share += f", {size(abs(total.sharded - total.replicated))} {'more' if _more(total) else 'less'}"
    return f"{before} -> {after} ({share})"


def _same(total: Total) -> bool:
    return abs(total.sharded - total.replicated) <= _SAME * total.replicated


def _more(total: Total) -> bool:
    return total.sharded > total.replicated and not _same(total)
