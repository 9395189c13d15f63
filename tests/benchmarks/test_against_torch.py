"""The comparison with PyTorch runs, and refuses to compare different work."""

from __future__ import annotations

import json

import against_torch
import pytest

pytestmark = pytest.mark.multiprocess

QUICK = ["--size", "smoke", "--processes", "2", "--rounds", "2", "--steps", "1", "--warm-up", "3"]


def rows(tmp_path, *variants):
    out = tmp_path / "torch.json"
    against_torch.main([*QUICK, "--scratch", str(tmp_path), "--json", str(out), "--variant", *variants])
    return json.loads(out.read_text())


@pytest.mark.thorough
def test_shardstep_in_two_processes_does_the_work_of_replicated_jit(tmp_path):
    ours, plain = rows(tmp_path, "shardstep", "replicated")
    assert ours["processes"] == plain["processes"] == 2
    assert ours["steps"] == plain["steps"] == 2
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert ours["step_ms"] > 0
    # Half of the moments each, but for what is too small to split: the norms' scales and the step count.
    assert plain["optimizer_bytes"] / 2 <= ours["optimizer_bytes"] < 0.51 * plain["optimizer_bytes"]


def test_other_work_is_no_result():
    ours = against_torch.Measured(against_torch.VARIANTS[0], 2, first_losses=[9.0, 3.0])
    other = against_torch.Measured(against_torch.VARIANTS[1], 2, first_losses=[9.0, 3.002])
    against_torch.check(ours, {"a": ours, "b": other})
    with pytest.raises(SystemExit, match="after 1 steps its loss is"):
        against_torch.check(other, {"a": ours, "b": other})


def test_what_fails_is_recorded_and_not_timed(tmp_path, monkeypatch):
    broken = against_torch.Variant("shardstep", "no-such-variant", "jax")
    monkeypatch.setattr(against_torch, "VARIANTS", [broken])
    (row,) = rows(tmp_path, "shardstep")
    assert row["step_ms"] is None and "ended by itself" in row["error"]


@pytest.mark.skipif(
    not against_torch.torch_python().exists(), reason="no .venv-torch; `make bench-torch` makes the environment"
)
def test_pytorch_does_the_same_work(tmp_path):
    ours, *torch = rows(tmp_path, "shardstep", "ddp-fused", "fsdp2-fused")
    for row in torch:
        assert row["error"] is None
        assert row["loss"] == pytest.approx(ours["loss"], rel=1e-4)
