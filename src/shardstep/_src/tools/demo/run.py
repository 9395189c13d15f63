"""Train a model twice, step by step in turn: replicated under `jax.jit`, sharded under `shardstep.shard`."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import shardstep

from ..commands.target import require_place
from ..report.terminal import console_for
from . import model, vision
from .optimizers import named

EXAMPLES_PER_REPLICA = 2
TOLERANCE = 1e-3  # relative; what reassociated sums may drift over a demo's worth of steps

Batch = dict[str, np.ndarray]


class State(NamedTuple):
    params: Any
    optimizer: Any


class Problem(NamedTuple):
    """What is trained: how its weights begin, what is made small, and the examples."""

    title: str
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batches: Callable[[int], Iterator[Batch]]


@dataclass
class Run:
    """One of the two trainings: its step, its state, and what was observed so far."""

    name: str
    step: Callable[[State, Batch], tuple[State, dict[str, Any]]]
    state: State
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, batch: Batch) -> None:
        start = time.perf_counter()
        self.state, metrics = jax.block_until_ready(self.step(self.state, batch))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(metrics["loss"]))

    @property
    def step_ms(self) -> float:
        """The median step; the first one compiles, and is left out where there are others."""
        return 1e3 * statistics.median(self.seconds[1:] or self.seconds)


def demo(steps: int, name: str = "transformer", optimizer: str = "adamw", html: str = "shardstep-demo.html") -> bool:
    """Run the demo; did the two trainings agree?"""
    require_place("--html", html)
    console = console_for()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    problem = PROBLEMS[name]()
    step, init = training(problem, optimizer)
    everywhere = NamedSharding(mesh, PartitionSpec())
    sharded_step = shardstep.shard(step, mesh)
    state = init(jax.random.key(0))
    batches = problem.batches(EXAMPLES_PER_REPLICA * mesh.size)
    plan = sharded_step.plan(state, next(batches))
    plan.to_html(html, title=f"shardstep demo: {problem.title}, {optimizer}")
    plain, sharded = runs = (
        Run("jax.jit", replicated(step, mesh), jax.device_put(state, everywhere)),
        Run("shardstep.shard", sharded_step, init(jax.random.key(0))),
    )
    describe(console, problem, optimizer, plain.state, mesh)
    train(console, runs, batches, steps)
    console.print(summary(plain, sharded))
    agree = verdict(console, plain, sharded)
    console.print(f"Report: {Path(html).resolve()}", soft_wrap=True)
    console.print(plot(runs, Path(html).with_suffix(".png")), soft_wrap=True)
    return agree


def training(problem: Problem, optimizer: str) -> tuple[Callable[..., Any], Callable[[jax.Array], State]]:
    """The training step as a user writes it, and how its state begins."""
    chosen = named(optimizer)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(problem.loss)(state.params, batch)
        params, moments = chosen.update(grads, state.optimizer, state.params)
        return State(params, moments), {"loss": loss}

    def init(key: jax.Array) -> State:
        params = problem.init(key)
        return State(params, chosen.init(params))

    return step, init


def example() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For `shardstep explain shardstep._src.tools.demo.run:example`."""
    problem = transformer()
    step, init = training(problem, "adamw")
    return step, (init(jax.random.key(0)), next(problem.batches(16)))


def replicated(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """What a user writes today: the batch split over the replicas, everything else on all of them."""
    everywhere, by_example = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(step, in_shardings=(everywhere, by_example), out_shardings=everywhere, donate_argnums=0)


# --- what is trained ------------------------------------------------------------------------------------------------


def transformer() -> Problem:
    tokens, config = load_text()
    return Problem(
        "a character transformer",
        functools.partial(model.init, config=config),
        functools.partial(model.loss, config=config),
        lambda size: windows(tokens, config, size),
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "transformer": transformer,
    "resnet": lambda: Problem("a small ResNet", vision.init_resnet, vision.resnet_loss, vision.pictures),
    "mlp": lambda: Problem("a multilayer perceptron", vision.init_mlp, vision.mlp_loss, vision.pictures),
}


def load_text() -> tuple[np.ndarray, model.Config]:
    """The text as one long array of character numbers."""
    text = files(__package__).joinpath("text.txt").read_text(encoding="utf-8")
    characters, tokens = np.unique(list(text), return_inverse=True)
    return tokens.astype(np.int32), model.Config(vocabulary=len(characters))


def windows(tokens: np.ndarray, config: model.Config, size: int) -> Iterator[Batch]:
    """Random windows of the text; each target is the character that follows."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(tokens) - config.context, size)
        chosen = tokens[starts[:, None] + np.arange(config.context + 1)]
        yield {"input": chosen[:, :-1], "target": chosen[:, 1:]}


# --- the show -------------------------------------------------------------------------------------------------------


def train(console: Console, runs: tuple[Run, ...], data: Iterator[Batch], steps: int) -> None:
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[ms]:7.1f} ms per step"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(run.name, total=steps, loss=float("nan"), ms=float("nan")) for run in runs]
        for batch in itertools.islice(data, steps):
            for run, task in zip(runs, tasks, strict=True):
                run.advance(batch)
                progress.update(task, advance=1, loss=run.losses[-1], ms=run.step_ms)


def describe(console: Console, problem: Problem, optimizer: str, state: State, mesh: Mesh) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(
        f"{problem.title.capitalize()} of {count:,} parameters with {optimizer}, on {mesh.size} simulated replicas of "
        f"{EXAMPLES_PER_REPLICA} examples each. The first step compiles."
    )


def plot(runs: tuple[Run, ...], file: Path) -> str:
    """Draw the losses, where there is something to draw with."""
    try:
        import matplotlib
    except ImportError:
        return "No plot of the losses: install matplotlib for that."
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=f"{run.name}, {run.step_ms:.0f} ms per step")
    axes.set(xlabel="step", ylabel="loss", title="the same training, twice")
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return f"Losses: {file.resolve()}"


def summary(plain: Run, sharded: Run) -> Table:
    table = Table("", plain.name, sharded.name, "ratio", title="the same training step, twice")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("loss at the first step", f"{plain.losses[0]:.6f}", f"{sharded.losses[0]:.6f}", "")
    table.add_row("loss at the last step", f"{plain.losses[-1]:.6f}", f"{sharded.losses[-1]:.6f}", "")
    before, after = plain.step_ms, sharded.step_ms
    table.add_row("median step", f"{before:.1f} ms", f"{after:.1f} ms", ratio(before, after))
    for name, part in (("weights", lambda s: s.params), ("optimizer state", lambda s: s.optimizer)):
        before, after = (bytes_a_replica(part(run.state)) for run in (plain, sharded))
        table.add_row(f"{name} per replica", megabytes(before), megabytes(after), ratio(before, after))
    return table


def verdict(console: Console, plain: Run, sharded: Run) -> bool:
    differences = np.abs(np.subtract(plain.losses, sharded.losses)) / np.abs(plain.losses)
    agree = bool(np.all(differences <= TOLERANCE))
    console.print(
        f"{'Same losses' if agree else 'The losses differ'}: over {len(differences)} steps the largest relative "
        f"difference is {differences.max():.1e}; {np.sum(differences == 0)} are equal to the last bit."
    )
    return agree


def bytes_a_replica(tree: Any) -> int:
    """What the first device really holds of these arrays."""
    first = jax.devices()[0]
    held = (leaf.data if isinstance(leaf, shardstep.Padded) else leaf for leaf in jax.tree.leaves(tree))
    shards = (shard for array in held for shard in array.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def ratio(before: float, after: float) -> str:
    return f"{before / after:.2f}x" if after else ""
