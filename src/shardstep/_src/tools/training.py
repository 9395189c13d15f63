"""A loop that lasts: it resumes from the newest whole checkpoint, saves in the background, and when told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..api import ShardedStep
from ..checkpoint import directories, staging
from ..checkpoint.restoring import latest_step, restore_newest
from ..checkpoint.retention import Retention
from ..checkpoint.saving import Saving, finish, save
from ..core.errors import ShardstepError
from ..planning.formatting import size
from ..runtime import processes

_CALIBRATE = 10  # steps: until it is known how long one takes
_FREE = 0.05  # of the time between two saves: what waiting for one may cost


def training(
    path: str | os.PathLike[str],
    step: ShardedStep,
    create_state: Callable[[], Any],
    batch: Any,
    *,
    save_every: int | None = None,
    save_minutes: float | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    background: bool = True,
    show_every: float = 10.0,
) -> Training:
    """A training run that goes on where it was interrupted.

        with shardstep.training("run", step, create_state, batch, save_every=1000, keep=3) as run:
            for i in run.steps(100_000):
                run.state, loss = step(run.state, next_batch(i))
                run.log(loss=loss)

    Args:
        path: where checkpoints are; the newest whole one is restored, and training starts afresh where there is none.
        step: a sharded step.
        create_state: makes the initial state; it is created in its layout.
        batch: an example of a batch, or its shapes.
        save_every: save after every so many steps.
        save_minutes: save after about so many minutes.
        keep: as for `shardstep.save`.
        keep_every: as for `shardstep.save`.
        background: go on while a checkpoint is written, where waiting for it would cost much. A save is waited for
            where it takes less than a twentieth of the time between two saves, or more than all of it (the next one
            would have to wait then), and the first one is; a kill costs at most `save_every` steps then. In between,
            training goes on and says so once: a run that is killed goes back to the checkpoint before, and loses those
            steps besides that it made while one was written, never more than twice `save_every`. With False every save
            is waited for.
        show_every: seconds between two lines of progress; a terminal shows a bar instead.

    SIGTERM ends the loop after a step that all processes agree on, with a checkpoint of it; `run.preempted` is then
    true. `jax.distributed`'s preemption service is used where it runs.
    """
    if not isinstance(step, ShardedStep):
        raise ShardstepError(f"training runs a step that shardstep.shard returned, and {type(step).__name__} is none")
    for name, value in (("save_every", save_every), ("save_minutes", save_minutes)):
        if value is not None and not value > 0:
            raise ShardstepError(f"training({name}={value!r}): use a number above 0")
    Retention.of(keep, keep_every, 0)  # refuses what makes no sense
    staging.refuse_what_cannot_be_written(directories.root_of(path))
    plan = step.plan(jax.eval_shape(create_state), batch)
    found = latest_step(path) is not None
    if not found and any(s.committed for s in directories.find(directories.root_of(path))):
        raise ShardstepError(f"{path} is one checkpoint, without a number: training numbers its own, use another path")
    at, state = restore_newest(path, plan) if found else (0, plan.init(create_state))
    run = Training(path, at or 0, state, _Schedule(save_every, save_minutes), _Show(show_every))
    run.retention, run.background = Retention(keep, keep_every), background
    if found:
        run.show.say(f"resumed at step {at}")
    return run


class Training:
    """A run: its state, and how many steps it has behind it."""

    def __init__(self, path: str | os.PathLike[str], at: int, state: Any, schedule: _Schedule, show: _Show):
        self.state = state
        self.step = at  # how many steps are done
        self.preempted = False
        self.retention = Retention()
        self.background = True
        self.show = show
        self._path = path
        self._schedule = schedule
        self._pace = _Pace()
        self._saved = at
        self._stop = _StopSignal()

    def __enter__(self) -> Training:
        self._stop.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.remove()
        self.show.close()
        finish()

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left. In between, checkpoints are saved; the last step always is."""
        self._schedule.begin(self.step)
        self.show.begin(self.step, total)
        while self.step < total:
            yield self.step
            self.step += 1
            self.preempted = self._stop.agreed(self.step)
            if self.preempted or self.step == total or self._schedule.is_due(self.step):
                self._save(wait=self.preempted)
            if self.preempted:
                self.show.say(f"preempted at step {self.step}: saved")
                return

    def log(self, **metrics: Any) -> None:
        """Show these with the step's number. They are read only when it is time to show something."""
        self.show.update(self.step, metrics)

    def _save(self, wait: bool) -> None:
        if self.step == self._saved:
            return
        kept = self.retention
        jax.block_until_ready(self.state)
        wait = wait or not self.background or self._pace.waits(self.show.say)
        saving = save(
            self._path,
            self.state,
            step=self.step,
            wait=wait,
            overwrite=True,
            keep=kept.keep,
            keep_every=kept.keep_every,
        )
        self._saved = self.step
        self._pace.saved(saving)
        self._schedule.saved(self.step)
        nbytes = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(self.state))
        self.show.saving = (saving, f"step {self.step} ({size(nbytes)})")


class _Schedule:
    """When to save. Processes must agree, and their clocks do not: minutes become steps, by the first one's clock."""

    def __init__(self, every: int | None, minutes: float | None):
        self._every = every
        self._minutes = minutes
        self._since = (0, 0.0)
        self._next: int | None = None

    def begin(self, step: int) -> None:
        self._since = (step, time.monotonic())
        self._next = step + _CALIBRATE if self._minutes else None

    def is_due(self, step: int) -> bool:
        if self._every and step % self._every == 0:
            return True
        if self._next is None or step < self._next:
            return False
        self._next = self._in_steps(step)
        return self._next <= step

    def _in_steps(self, step: int) -> int:
        """The step at which the minutes will have passed, if steps go on taking as long as they did."""
        assert self._minutes is not None
        begun, when = self._since
        passed = time.monotonic() - when
        left = (60 * self._minutes - passed) / max(passed / max(step - begun, 1), 1e-9)
        return step + int(processes.from_first(str(max(int(left), 0))))

    def saved(self, step: int) -> None:
        if self._minutes:
            self.begin(step)


class _Pace:
    """Whether to wait for a save: a kill then costs no more than the steps between two of them."""

    def __init__(self) -> None:
        self._last: Saving | None = None
        self._since = 0.0  # when the steps after it began
        self._said = False

    def saved(self, saving: Saving) -> None:
        self._last, self._since = saving, time.monotonic()

    def waits(self, say: Callable[[str], None]) -> bool:
        """To be asked when the next save is due, and its state has been computed; by all processes."""
        share = self._share()
        if share is None or not _FREE < share < 1:
            return True
        if not self._said:
            say(
                f"a checkpoint takes {100 * share:.0f} % of the time between two: training goes on while one is written"
                " (a kill may cost those steps, too; background=False waits)"
            )
        self._said = True
        return False

    def _share(self) -> float | None:
        """What the last save took, of the time that the steps since have taken; on the first process."""
        if self._last is None:
            return None
        steps = max(time.monotonic() - self._since, 1e-9)
        return float(processes.from_first(str(self._last.seconds / steps)))


class _StopSignal:
    """SIGTERM: remembered, and heeded between two steps."""

    def __init__(self) -> None:
        self._seen = False
        self._before: Any = None
        self._ours = False

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread() and not _has_service():
            self._before = signal.signal(signal.SIGTERM, self._handle)
            self._ours = True

    def remove(self) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, self._before)
            self._ours = False

    def _handle(self, *_: Any) -> None:
        self._seen = True

    def agreed(self, step: int) -> bool:
        """Is this the step after which all processes stop?"""
        if _has_service():
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(processes.first_of("stop" if self._seen else ""))


def _has_service() -> bool:
    """Does JAX watch for preemption by itself? It does in runs of many processes, unless it was told not to."""
    return jax.process_count() > 1 and bool(getattr(jax.config, "jax_enable_preemption_service", False))


class _Show:
    """Progress, of the first process: a bar on a terminal, lines elsewhere."""

    def __init__(self, every: float):
        self.saving: tuple[Saving, str] | None = None
        self._every = every
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._last = (0, 0.0)

    def begin(self, step: int, total: int) -> None:
        self._last = (step, time.monotonic())
        if self._console.is_terminal and processes.is_first():
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._bar.add_task("", total=total, completed=step)

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        before, when = self._last
        now = time.monotonic()
        if not processes.is_first() or now - when < (0.5 if self._bar else self._every):
            return
        numbers = [f"{name} {float(value):.6f}" for name, value in metrics.items()]
        speed = [f"{(step - before) / max(now - when, 1e-9):.2f} steps/s"] if step > before else []
        self._last = (step, now)
        saves = [f"{'saved' if self.saving[0].whole else 'saving'} {self.saving[1]}"] if self.saving else []
        words = "  ".join([*numbers, *speed, *saves])
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, description=words)
        else:
            self.say(f"step {step} {words}")

    def say(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text)
        elif processes.is_first():
            print(text, file=sys.stdout, flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
