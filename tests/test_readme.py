"""The README's table of results is printed from `benchmarks/results/latest.json`: every figure is of one run.

Where new results are committed, regenerate with `python tests/test_readme.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CELL = {"workload": "transformer-42m", "optimizer": "adamw+clip", "devices": 8, "malloc": "keep"}
VARIANTS = {
    "replicated": "`jax.jit`, state replicated",
    "zero1": "ZeRO-1 by hand (`NamedSharding` on the moments)",
    "fsdp": "FSDP by hand",
    "shardstep": "**shardstep**",
    "shardstep-sharded": '**shardstep**, `weights="sharded"`',
}
PLACE = re.compile(r"(<!-- results: [^>]*-->\n).*?(<!-- end of results -->)", re.S)


def results() -> str:
    rows = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text(encoding="utf-8"))
    found = {r["variant"]: r for r in rows if all(r[name] == value for name, value in CELL.items())}
    assert len({found[variant]["date"] for variant in VARIANTS}) == 1  # one run
    first = found["replicated"]
    lines = [
        f"A transformer of {first['parameters'] / 1e6:.0f}M parameters, AdamW with clipping, {first['devices']}"
        f" simulated CPU devices on {first['machine']['cores']} cores,",
        f"JAX {first['versions']['jax']}, {first['date'][:10]}. Devices share cores and memory, so ratios count.",
        "",
        "| | step | arguments + temporaries | sent per device |",
        "| --- | --- | --- | --- |",
    ]
    for variant, name in VARIANTS.items():
        r = found[variant]
        memory = (r["arg_bytes"] + r["temp_bytes"]) / 1e6
        lines.append(f"| {name} | {r['step_ms']:.0f} ms | {memory:.0f} MB | {r['wire_bytes'] / 1e6:.0f} MB |")
    return "\n".join(lines) + "\n"


def test_the_figures_of_the_readme_are_those_of_the_committed_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert PLACE.sub(lambda m: m[1] + results() + m[2], text) == text, __doc__
    outside = PLACE.sub("", text)
    assert not re.search(r"\d\s?(?:ms|MB|GB|x faster)\b", outside)  # no measured figure anywhere else


@pytest.fixture
def for_index(monkeypatch):
    """`hatch_build.py`, which hatchling imports when it builds the package."""
    interface = types.ModuleType("interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    return built.for_index


def test_a_package_index_gets_no_relative_links(for_index):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.compile(r"\]\((?!https://)")
    assert relative.search(text)
    alone, hosted = for_index(text), for_index(text, "https://example.org/shardstep", "1.0")
    assert not relative.search(alone) and not relative.search(hosted)
    assert "[All limits](https://example.org/shardstep/blob/v1.0/docs/limits.md)" in hosted
    assert "](https://example.org/shardstep/raw/v1.0/docs/images/update.svg)" in hosted
    assert "\nAll limits.\n" in alone and "*The weight update before and after*" in alone
    quick_start = text.split("```python")[1].split("```")[0]
    assert quick_start in alone and quick_start in hosted


if __name__ == "__main__":
    file = ROOT / "README.md"
    file.write_text(PLACE.sub(lambda m: m[1] + results() + m[2], file.read_text(encoding="utf-8")), encoding="utf-8")
