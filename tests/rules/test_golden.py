"""All rules of the package in alphabetical order, as they print: golden/rules.txt.

Regenerate on the newest JAX: the file holds the primitives of all versions, and each version checks those it has.
"""

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from canonical import example

from shardstep._src.core import compat
from shardstep._src.rules import contract
from shardstep._src.rules.printing import printed

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "rules.txt"
LEGEND = """\
Every registered rule on a small example, for n = 2. Printed by shardstep/_src/rules/printing.py.

An equation names the indices of operands and results: `*` cannot be split, `ij` is one dimension that holds both.
A table has one row for each way in which the operands come:  operands as they come: as the rule takes them -> results.
R: replicated   Sd: split on dimension d (Sd/k: inside blocks of k)   P, Pmax: partial sum, maximum   V: varying
gather: no split is kept. Partial operands of other equations are reduced first.
"""

# Read before any test runs, so that rules which tests teach stay out.
OWN = contract.registered()


def blocks() -> dict[str, str]:
    return {primitive.name: printed(example(primitive)) for primitive in OWN}


def parse(text: str) -> dict[str, str]:
    entries = text.removeprefix(LEGEND).strip().split("\n\n")
    return {name: textwrap.dedent(body) for name, _, body in (e.partition("\n") for e in entries)}


def test_every_rule_prints_as_in_the_golden_file():
    golden, now = parse(GOLDEN.read_text(encoding="utf-8")), blocks()
    differing = [name for name in now if now[name] != golden.get(name)]
    assert not differing, f"regenerate with: python tests/rules/test_golden.py ({differing})"
    absent = set(golden) - set(now)
    assert absent == {name for name in compat._LIFETIMES if compat.primitive(name) is None}


def test_the_golden_file_is_in_alphabetical_order():
    names = list(parse(GOLDEN.read_text(encoding="utf-8")))
    assert names == sorted(names)


if __name__ == "__main__":
    entries = (f"{name}\n{textwrap.indent(body, '    ')}" for name, body in sorted(blocks().items()))
    GOLDEN.write_text(LEGEND + "\n" + "\n\n".join(entries) + "\n", encoding="utf-8")
