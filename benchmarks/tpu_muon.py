"""Muon as the TPU compiler sees it: what becomes of the update when each chip owns some of the matrices.

    python benchmarks/tpu_muon.py                            # the cells that are missing in results/tpu_muon.json
    python benchmarks/tpu_muon.py --topology v5e:4x4 --again # these, measured or not

64 weights of 1024 x 1024 in a residual network, 256 examples per replica, `optax.contrib.muon`: one matrix for each
chip of v5p:4x4x4, four of v5e:4x4. Method, columns and what they leave out are those of `tpu_aot.py`. Two goals: update
cycles at most 1.5/N of the replicated program's, and no all-reduce of the size of a weight.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

import tpu_aot
from recorded import RESULTS, Row, digest, keep, read

TOPOLOGIES = ("v5e:4x4", "v5p:4x4x4")
VARIANTS = ("replicated", "zero1", "weights replicated", "weights sharded")
ALLOWED = 1.5  # update cycles, times 1/N of the replicated program's


def projections(replicas: int, optimizer: Any) -> tpu_aot.Workload:
    import jax
    import jax.numpy as jnp

    def loss(weights: list[jax.Array], _: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        for w in weights:
            x = x + jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean(x**2), {}

    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 64
    batch = jax.ShapeDtypeStruct((256 * replicas, 1024), jnp.float32)
    return tpu_aot.training(loss, {"params": weights}, optimizer, batch)


def main() -> None:
    import optax

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--again", action="store_true", help="compile also what was compiled before")
    args = parser.parse_args()
    tpu_aot.WORKLOADS["projections"] = projections
    tpu_aot.OPTIMIZERS["muon"] = optax.contrib.muon(1e-3)
    for topology in args.topology:
        for variant in args.variant:
            known = {(row["topology"], row["variant"]): row for row in read("tpu_muon")}
            if (topology, variant) in known and not args.again:
                continue
            row, _ = tpu_aot.compile_one(topology, "projections", "muon", variant)
            made = json.loads(json.dumps(asdict(replace(row, code=digest("tpu_muon")))))
            keep("tpu_muon", in_order([*(r for r in known.values() if place(r) != place(made)), made]))
            print(
                topology, variant, f"{row.cycles_update:.0f}k of update, {row.compile_s:.0f} s to compile", flush=True
            )
    print(*goals(read("tpu_muon", RESULTS)), sep="\n")


def place(row: Row) -> tuple[int, int]:
    return TOPOLOGIES.index(row["topology"]), VARIANTS.index(row["variant"])


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=place)


def goals(rows: list[Row]) -> list[str]:
    """Each program of ours against the replicated one on the same topology."""
    base = {row["topology"]: row for row in rows if row["variant"] == "replicated"}
    said = []
    for row in rows:
        before = base.get(row["topology"])
        if before is None or row is before:
            continue
        share = row["replicas"] * row["cycles_update"] / before["cycles_update"]
        met = share <= ALLOWED and not row["large_all_reduces"]
        said.append(
            f"{row['topology']:10s} {row['variant']:18s} update {share:.2f}/N of replicated,"
            f" {row['large_all_reduces']} large all-reduces: {'met' if met else 'missed'}"
        )
    return said


if __name__ == "__main__":
    main()
