"""One source of figures: every row says what it was measured of, and no page shows a figure that is in no row."""

from __future__ import annotations

import json
import subprocess
import sys

import adopt
import bench_check
import figures
import history
import pytest
import recorded
from recorded import RESULTS, ROOT, SCRIPTS, read

FILES = sorted(path.stem for path in RESULTS.glob("*.json"))


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_row_says_what_it_was_measured_of(name):
    rows = read(name)
    assert isinstance(rows, list) and rows and name in SCRIPTS
    for row in rows:
        assert len(row["commit"]) == 12 and row["date"][:2] == "20"
        assert row["machine"]["processor"] and row["versions"]["jax"]


def test_every_script_that_rows_name_is_there():
    for name in SCRIPTS:
        assert len(recorded.measured_code(name)) >= len(SCRIPTS[name])
        assert all((ROOT / "benchmarks" / f"{script}.py").exists() for script in SCRIPTS[name])


# -- pages ----------------------------------------------------------------------------------------------------------


def test_no_page_shows_a_figure_that_is_in_no_row():
    """Measure anew, or correct the page; what no script keeps rows of belongs into results/notes.json."""
    assert not [str(figure) for figure in figures.unknown()]


ROW = {"step_ms": 98.622, "argument_bytes": 1.9e9, "temporary_bytes": 2.6e9, "cycles_update": 38.1, "peak_mb": 33.0}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 98.6 ms", True),
        ("takes 98.7 ms", False),
        ("takes 99 ms and holds 4.5 GB", True),
        ("holds 4.6 GB", False),
        ("of 38,100 cycles, or 38.1 thousand cycles", True),
        ("| a step | 98.62 |", True),  # a table says its unit in its head
        ("| a step | 98.63 |", False),
        ("JAX 0.10.2, `4.6 GB`, a block of 64 KiB, eight devices", True),  # no measurements
        ("```\n98.7 ms\n```", True),
        ("38.1 GB", False),  # another kind
    ],
)
def test_figures_are_roundings_of_rows(tmp_path, text, found):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "latest.json").write_text(json.dumps([ROW]))
    assert (not figures.unknown(tmp_path, tmp_path)) is found


# -- rows that are old ----------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """One script, committed, and one row that was measured of it."""

    def git(*arguments):
        command = ("git", "-c", "user.name=n", "-c", "user.email=e", *arguments)
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    script, results = tmp_path / "benchmarks" / "gpu_replica.py", tmp_path / "results"
    script.parent.mkdir()
    results.mkdir()
    script.write_text("steps = 1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")

    def measured(**more):
        row = {"commit": git("rev-parse", "--short=12", "HEAD"), "date": "2026-01-01T00:00:00", **more}
        (results / "gpu_replica.json").write_text(json.dumps([row]))

    return tmp_path, script, measured


def test_rows_are_old_once_their_code_has_changed(repository):
    root, script, measured = repository
    measured()
    assert not list(bench_check.old(root / "results", root))
    script.write_text("steps = 2\n")
    (found,) = bench_check.old(root / "results", root)
    assert found.changed == ("benchmarks/gpu_replica.py",) and found.rows == 1
    assert str(found).startswith("gpu_replica.json: 1 rows of ")
    script.write_text("steps = 1\n")
    (root / "benchmarks" / "plots.py").write_text("")  # nothing that these rows depend on
    assert not list(bench_check.old(root / "results", root))


def test_a_digest_outlives_the_commit(repository):
    root, script, measured = repository
    measured(commit="0" * 12, code=recorded.digest("gpu_replica", root))
    assert not list(bench_check.old(root / "results", root))
    script.write_text("steps = 2\n")
    (found,) = bench_check.old(root / "results", root)
    assert "the code differs" in str(found)
    measured(commit="0" * 12)  # from before there were digests, and nobody knows the commit: who can tell?
    assert list(bench_check.old(root / "results", root))


# -- rows of other machines -----------------------------------------------------------------------------------------


def test_rows_of_a_machine_without_git_get_the_commit_of_their_code():
    here = recorded.revision("gpu_replica")
    old = [{"workload": "six", "replicas": n, "optimizer": "adam", "commit": "a" * 12} for n in (8, 64)]
    new = {**old[0], **here, "commit": "unknown"}
    for said in ("unknown", "b" * 12):  # a copy of work that is not published yet names an older commit
        assert adopt.adopted("gpu_replica", old, [{**new, "commit": said}]) == [new | here, old[1]]
    other = {**new, "commit": "b" * 12, "code": "0" * 12}
    assert adopt.adopted("gpu_replica", old, [other]) == [other, old[1]]
    with pytest.raises(adopt.OtherCode, match="other code"):
        adopt.adopted("gpu_replica", old, [{**new, "code": "0" * 12}])
    assert adopt.adopted("gpu_replica", old, [{**new, "failure": "stopped", "variants": {}}]) == old


# -- what the kernel counts -----------------------------------------------------------------------------------------

ALONE = """
import socket, turns
assert turns.sent_on_loopback() is None  # others send there too
if not turns.be_alone_on_loopback():
    raise SystemExit(77)
before = turns.sent_on_loopback()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
    other, _ = server.accept()
    with other:
        for _ in range(16):
            one.sendall(bytes(2**20))
            left = 2**20
            while left:
                left -= len(other.recv(left))
print(turns.sent_on_loopback() - before)
"""


def test_the_kernel_counts_what_is_sent_on_loopback():
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("a network of its own is refused here: not root")
    assert done.returncode == 0, done.stderr
    assert 2**24 <= int(done.stdout) <= 1.02 * 2**24


def test_the_plan_says_what_the_kernel_counts():
    """Headers and acknowledgements included, to 5 %."""
    rows = [row for row in read("wire") if row["planned_wire_bytes"]]
    assert rows
    for row in rows:
        assert row["loopback_bytes"] == pytest.approx(row["planned_wire_bytes"], rel=0.05), row["variant"]


# -- history --------------------------------------------------------------------------------------------------------


def row(date, step_ms, **more):
    about = {"machine": {"cores": 2}, "versions": {"jax": "1"}, "commit": "c" * 12}
    cell = {"workload": "m", "optimizer": "adam", "devices": 8, "variant": "shardstep"}
    return {**cell, **about, "date": date, "step_ms": step_ms, **dict.fromkeys(history.FIGURES[1:], 1.0), **more}


def test_history_keeps_every_measurement_once(tmp_path):
    history.record([row("2026-01-02", 7.0)], tmp_path)
    history.record([row("2026-01-02", 7.0, commit="d" * 12), row("2026-01-01", 9.0)], tmp_path)
    assert [(e["date"], e["step_ms"], e["commit"]) for e in history.known(tmp_path)] == [
        ("2026-01-01", 9.0, "c" * 12),
        ("2026-01-02", 7.0, "c" * 12),
    ]


def test_what_was_measured_is_in_the_committed_history():
    entries = {history.same(entry) for entry in history.known()}
    assert entries >= {history.same(history.line(row)) for row in read("latest")}
