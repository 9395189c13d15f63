"""`shardstep check`: the plain and the sharded program, leaf by leaf."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table
from rich.text import Text

from ...planning.formatting import array
from ..check import Check
from ..check import check as compare
from ..report.terminal import console_for
from . import target

ROWS = 40


def check(name: str, steps: int, tolerance: float) -> int:
    """Compare the program `name` with itself, sharded over all devices."""
    program = target.call(target.find(name))
    target.require_values(program, "check")
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    found = compare(program.sharded(mesh), *program.args, steps=steps)
    console = console_for()
    if found.lossy:
        console.print(f"{found.lossy}.", style="bold red", soft_wrap=True)
    console.print(differences(found, tolerance))
    agree = found.within(tolerance)
    exact = sum(leaf.exact for leaf in found.leaves)
    verdict = "Same numbers" if agree else "The programs differ"
    console.print(
        f"{verdict}: {exact} of {len(found.leaves)} leaves are equal to the bit, and the largest relative difference is"
        f" {found.relative:.1e} (tolerance {tolerance:g}).",
        style="green" if agree else "bold red",
        soft_wrap=True,
    )
    return 0 if agree else 1


def differences(found: Check, tolerance: float) -> Table:
    title = f"plain against sharded: {found.steps} steps on {found.replicas} replicas"
    table = Table("leaf", "array", "largest difference", "relative", title=title, title_justify="left")
    leaves = sorted(found.leaves, key=lambda leaf: (leaf.exact, -leaf.relative))
    for leaf in leaves[:ROWS]:
        over = not leaf.exact and not leaf.relative <= tolerance
        numbers = ("exact", "") if leaf.exact else (f"{leaf.absolute:.2e}", f"{leaf.relative:.2e}")
        style = "red" if over else ""
        table.add_row(*(Text(t, style=style) for t in (leaf.path, array(leaf.dtype, leaf.shape), *numbers)))
    if len(leaves) > ROWS:
        table.caption = f"and {len(leaves) - ROWS} more leaves, none further apart"
    return table
