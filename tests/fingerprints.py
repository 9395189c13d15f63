"""What ten programs of the zoo compile to: a digest of each optimized HLO module, without names of modules and files.

    python tests/fingerprints.py before.json                  # on one commit
    python tests/fingerprints.py after.json --against before.json    # on another: says which programs changed

Commits that only move code must change none of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import shardstep

PROGRAMS = (
    ("transformer", {}),
    ("transformer_bf16", {"weights": "sharded"}),
    ("transformer_scanned_layers", {"weights": "sharded"}),
    ("resnet", {}),
    ("moe", {}),
    ("lstm", {"group": 4}),
    ("gan", {}),
    ("recommender", {"weights": "sharded"}),
    ("accumulation_scan", {}),
    ("steps_in_a_scan", {"group": 2}),
)
_NAMES = re.compile(
    r"^HloModule [^,]*|, metadata=\{[^}]*\}|^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d.*\n)*\n?", re.M
)


def digest(name: str, how: dict) -> str:
    from zoo import ZOO

    program = ZOO[name]()
    step = shardstep.shard(program.step, batch_argnums=program.batch_argnums, batch_axis=program.batch_axis, **how)
    text = step.lower(*program.state, *program.batches[0]).compile().as_text()
    return hashlib.sha256(_NAMES.sub("", text).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    found = {f"{name} {how}": digest(name, how) for name, how in PROGRAMS}
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.against is None:
        return 0
    before = json.loads(asked.against.read_text())
    changed = [name for name, value in found.items() if before.get(name) != value]
    print(f"{len(found) - len(changed)} of {len(found)} programs unchanged", *changed, sep="\n  ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
