"""What all examples share: data, a training loop with a progress bar, a plot of the loss, a command line.

Nothing here knows of shardstep or of any framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

Batch = dict[str, np.ndarray]
FEATURES, CLASSES, EXAMPLES = 64, 10, 128


def batches(steps: int, start: int = 0) -> Iterator[Batch]:
    """Made data: noisy points around one centre for each class. Batch i is the same in every run."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    for i in range(start, steps):
        random = np.random.default_rng((1, i))
        label = random.integers(0, CLASSES, EXAMPLES)
        image = centres[label] + 2.0 * random.normal(size=(EXAMPLES, FEATURES))
        yield {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def train(step: Callable[[Batch], jax.Array], steps: int, start: int = 0) -> list[float]:
    """Call `step` for each batch, show how it goes, and return the losses.

    A loss is read one step late: reading it at once would make the devices wait for Python.
    """
    losses: list[jax.Array] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=steps, completed=start, loss="-")
        for batch in batches(steps, start):
            losses.append(step(batch))
            shown = f"{float(losses[-2]):.4f}" if len(losses) > 1 else "-"
            progress.update(bar, advance=1, loss=shown)
    return [float(loss) for loss in losses]


def plot(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no window: the plot is a file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss", title=path.stem)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def command_line(main: Callable[..., list[float]], name: str) -> None:
    """Run an example on simulated devices: `python examples/NAME.py [--plain] [--steps N]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="train without shardstep, to compare")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to simulate; 0: those of the machine")
    options = parser.parse_args()
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    losses = main(options.steps, plain=options.plain)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    path = Path(f"{name}.png")
    try:
        plot(losses, path)
        print(f"plotted in {path}")
    except ModuleNotFoundError:
        print("no plot: pip install matplotlib")
