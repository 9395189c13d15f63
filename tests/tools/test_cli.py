"""The command line, as a user meets it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import programs
import pytest

import shardstep
from shardstep._src.tools import cli, measuring
from shardstep._src.tools.commands import explain as explaining
from shardstep._src.tools.commands import target

HERE = Path(__file__).parents[1]
PROGRAMS = HERE / "programs.py"


def run(*args, timeout=300, **more):
    """In a process of its own, where devices are not settled yet."""
    settled = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "COLUMNS")  # xdist tells its workers how wide they are
    environment = {k: v for k, v in os.environ.items() if k not in settled}
    return subprocess.run(
        [sys.executable, "-m", "shardstep", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**environment, **more},
    )


@pytest.fixture
def main(monkeypatch, capsys):
    """The command in this process: its devices are the eight of all tests."""
    monkeypatch.setattr(cli, "simulate_devices", lambda count: None)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args):
        status = cli.main([str(a) for a in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


# -- explain ------------------------------------------------------------------------------------------------------


def test_explain_tells_the_whole_story_without_colours_in_a_pipe():
    done = run("explain", f"{PROGRAMS}:mlp", "--devices", "4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "\x1b" not in done.stdout
    for said in ("4 replicas", "Verdict", "Kept", "Sent", "replicated + split(0)", "reduce-scatter", "all-gather"):
        assert said in done.stdout
    assert "gradient of second and 1 more" in done.stdout and "new weight first and 1 more" in done.stdout
    assert "(lines of programs.py)" in done.stdout and re.search(
        r"KiB +16$", done.stdout, re.M
    )  # the line that first reads the gradient
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_explain_plans_for_replicas_that_do_not_exist():
    done = run("explain", f"{PROGRAMS}:mlp", "--replicas", "64", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["replicas"] == 64
    moments = [leaf for leaf in plan["leaves"] if "mean" in leaf["path"]]
    assert [leaf["bytes_after"] for leaf in moments] == [64 * 64 * 4 // 64] * 2


def test_explain_plans_for_a_machine_that_one_does_not_have():
    done = run("explain", f"{PROGRAMS}:mlp", "--topology", "v5e:4x4", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["replicas"] == 16 and "TPU v5" in plan["topology"]
    assert 0 < plan["update_seconds"]["sharded"] < plan["update_seconds"]["replicated"]


@pytest.mark.tpu
@pytest.mark.slow
def test_the_tpu_compiler_is_asked_where_it_is_installed():
    pytest.importorskip("libtpu")
    done = run("explain", f"{PROGRAMS}:mlp", "--topology", "v5e:2x2", "--compile", "--json")
    assert done.returncode == 0, done.stderr
    found = {c["program"]: c for c in json.loads(done.stdout)["compiled"]}
    assert list(found) == ["replicated", "ZeRO-1 by hand", "shardstep"]
    assert all(c["cycles"] > 0 for c in found.values())
    assert found["shardstep"]["argument_bytes"] < found["replicated"]["argument_bytes"]


def test_a_batch_that_does_not_divide_is_planned_larger_and_said_so():
    done = run("explain", f"{PROGRAMS}:mlp", "--replicas", "12", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["notes"] == ["planned for a batch of 24 examples: 12 replicas do not share 16 evenly"]


def test_an_unknown_machine_is_one_message(main):
    status, _, err = main("explain", f"{PROGRAMS}:mlp", "--topology", "pdp11:1")
    assert status == 2 and "v5e" in err and "Traceback" not in err


def test_a_factory_may_return_a_sharded_step_with_its_settings(main):
    _, out, _ = main("explain", f"{PROGRAMS}:weights_sharded", "--json")
    assert json.loads(out)["weights"] == "sharded"


def test_explain_creates_no_weights(main):
    status, out, _ = main("explain", f"{PROGRAMS}:enormous")
    assert status == 0
    assert "16.0 TiB -> 2.0 TiB" in out  # few examples go to the weights, which are then sharded


def test_explain_takes_shapes(main):
    status, out, _ = main("explain", f"{PROGRAMS}:shapes", "--json")
    assert status == 0 and json.loads(out)["notes"] == []


def test_explain_says_when_the_factory_had_to_run_for_real(main):
    status, out, _ = main("explain", f"{PROGRAMS}:values")
    assert status == 0 and "it was run for real" in out


def test_all_shows_what_groups_hide(main):
    _, grouped, _ = main("explain", f"{PROGRAMS}:mlp")
    _, every, _ = main("explain", f"{PROGRAMS}:mlp", "--all")
    assert "state['mean']['first']" in every and every.count("f32[64,64]") == 4
    assert "state['mean']" not in grouped and "optimizer state: only the update uses it" in every


def test_a_pipe_that_closes_early_is_no_failure():
    command = f"{sys.executable} -m shardstep explain {PROGRAMS}:mlp --all | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_weights_may_be_asked_for(main):
    _, out, _ = main("explain", f"{PROGRAMS}:mlp", "--weights", "sharded")
    assert "sharded at rest (as asked)" in out


@pytest.mark.filterwarnings("ignore:shardstep. the step needs")
def test_memory_may_be_limited(main):
    _, out, _ = main("explain", f"{PROGRAMS}:mlp", "--memory", "1GiB")
    assert "of 1.0 GiB; replicated" in out
    _, out, _ = main("explain", f"{PROGRAMS}:mlp", "--memory", "10kB")
    assert "worse than the replicated step: too large" in out and "a device has 9.8 KiB" in out


@pytest.mark.parametrize(("text", "nbytes"), [("16GiB", 2**34), ("80gb", 80 * 10**9), ("2e10", 2 * 10**10), ("7 B", 7)])
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert cli.memory(text) == nbytes


def test_the_compiler_that_cannot_be_asked_is_one_message(main):
    status, _, err = main("explain", f"{PROGRAMS}:mlp", "--compile")
    assert status == 2 and "name a TPU with --topology" in err


def test_explain_names_what_was_not_sharded_and_what_to_do(main):
    status, out, _ = main("explain", f"{PROGRAMS}:fallback")
    assert status == 0
    assert "Not sharded" in out and "fft" in out and "programs.py" in out and "another dimension" in out


def test_explain_says_when_the_step_is_left_to_xla(main):
    status, out, _ = main("explain", f"{PROGRAMS}:left_to_xla")
    assert status == 0
    assert "the step is left to XLA: as asked" in out and "chooses its collectives" in out
    assert "Nothing is sent" not in out and "No fallbacks" not in out


def test_json_is_the_plan(main):
    _, out, _ = main("explain", f"{PROGRAMS}:mlp", "--json")
    shown = json.loads(out)
    import shardstep

    step, args = programs.mlp()
    plan = json.loads(shardstep.shard(step).plan(*args).to_json())
    assert {k: v for k, v in shown.items() if k not in ("program", "compiled")} == plan
    assert plan["auxiliary_share"] == 2 * 16384 / (2 * 16384 + 4)  # all but the counter
    assert [s["what"] for s in plan["timeline"]][:2] == ["forward", "backward"]


def test_html_is_written_and_named(main, tmp_path):
    file = tmp_path / "report.html"
    status, out, _ = main("explain", f"{PROGRAMS}:mlp", "--html", file)
    assert status == 0 and str(file) in out
    assert file.read_text().startswith("<!doctype html>")


def test_a_module_is_named_like_a_file(main, monkeypatch):
    monkeypatch.chdir(HERE)
    assert main("explain", "programs:mlp")[0] == 0


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("nowhere.py:mlp", 2, "there is no file nowhere.py"),
        ("no_such_module:mlp", 2, "there is no module 'no_such_module'"),
        ("programs.py", 2, "path.py:factory"),
        (f"{PROGRAMS}:nothing", 2, "has no 'nothing'"),
        (f"{PROGRAMS}:NOT_A_FUNCTION", 2, "is an int, not a function"),
        (f"{PROGRAMS}:raises", 1, "RuntimeError: the data set is not here"),
        (f"{PROGRAMS}:returns_a_number", 1, "must return (step, example_args)"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "check", "bench"])
def test_what_cannot_be_looked_at_is_one_message(main, command, name, status, message):
    got, out, err = main(command, name)
    assert got == status and message in err and "Traceback" not in err and out == ""


@pytest.mark.thorough
def test_ten_thousand_leaves_are_planned():
    """How long that takes is printed (`pytest -rP`): about 7 s beyond 4 s of tracing on an idle core."""
    step, args = programs.many_leaves()
    assert len(jax.tree.leaves(args)) == 10_001
    with explaining.undisturbed():
        start = time.process_time()
        jax.make_jaxpr(step)(*args)
        traced = time.process_time() - start
        start = time.process_time()
        plan = explaining.plan_for(target.Target(step, args), explaining.all_devices()).plan
        taken = time.process_time() - start - traced
    assert len(plan.leaves) == 10_001
    print(f"planned in {taken:.1f} s beyond the {traced:.1f} s of tracing")


# -- check --------------------------------------------------------------------------------------------------------


def test_check_agrees():
    done = run("check", f"{PROGRAMS}:mlp", "--devices", "4", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "2 steps on 4 replicas" in done.stdout and "Same numbers" in done.stdout and "\x1b" not in done.stdout


def test_check_fails_where_the_programs_differ(main):
    status, out, _ = main("check", f"{PROGRAMS}:forgetful")
    assert status == 1 and "The programs differ" in out and "['loss']" in out


def test_check_fails_on_a_tolerance_of_nothing(main):
    assert main("check", f"{PROGRAMS}:mlp", "--tolerance", "0")[0] == 1


def test_check_needs_values(main):
    status, _, err = main("check", f"{PROGRAMS}:shapes")
    assert status == 1 and "is only a shape" in err


# -- bench --------------------------------------------------------------------------------------------------------


def test_bench_times_four_programs_and_keeps_the_figures(tmp_path):
    file = tmp_path / "rows.json"
    done = run("bench", f"{PROGRAMS}:mlp", "--devices", "4", "--steps", "3", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "3 steps of each in turn on 4 devices" in done.stdout and "\x1b" not in done.stdout
    rows = {row["variant"]: row for row in json.loads(file.read_text())}
    assert list(rows) == ["replicated", "zero1", "shardstep", "shardstep-sharded"]
    assert all(set(measuring.SCHEMA) <= set(row) and name in done.stdout for name, row in rows.items())
    assert all(row["step_ms"] > 0 and row["devices"] == 4 for row in rows.values())
    # two weights and their moments of 16 KiB, 64 columns of examples; the moments are split, then the weights too
    assert rows["replicated"]["arg_bytes"] - rows["zero1"]["arg_bytes"] == 2 * 16384 * 3 // 4
    assert rows["zero1"]["arg_bytes"] == rows["shardstep"]["arg_bytes"]
    assert rows["shardstep"]["arg_bytes"] - rows["shardstep-sharded"]["arg_bytes"] == 2 * 16384 * 3 // 4
    assert rows["shardstep"]["wire_bytes"] <= rows["replicated"]["wire_bytes"] < rows["zero1"]["wire_bytes"]


def test_bench_says_when_the_programs_differ(main):
    status, out, _ = main("bench", f"{PROGRAMS}:forgetful", "--steps", "1")
    assert status == 1 and "computes something else than replicated" in out


def test_bench_runs_steps_for_one_replica(main):
    status, out, _ = main("bench", f"{PROGRAMS}:one_replica", "--steps", "2")
    assert status == 0 and "zero1" not in out and "shardstep-sharded" in out


def test_bench_needs_values_that_the_replicas_share(main, tmp_path):
    status, _, err = main("bench", f"{PROGRAMS}:shapes")
    assert status == 1 and "bench runs the step, but" in err and "is only a shape" in err
    status, _, err = main("bench", f"{PROGRAMS}:uneven")
    assert status == 1 and "batch['x'] has 12 examples, which 8 devices do not share evenly" in err
    status, _, err = main("bench", f"{PROGRAMS}:mlp", "--json", tmp_path / "nowhere" / "rows.json")
    assert status == 2 and "there is no such directory" in err


# -- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["explain", "check", "bench", "demo"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    assert f"shardstep {command}" in capsys.readouterr().out.partition("examples:")[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "--devices", "0"], "0 is not positive"),
        (["demo", "--model", "oracle"], "invalid choice"),
        (["explain"], "PROGRAM"),
        (["check", "x:y", "--tolerance", "-1"], "no tolerance"),
        (["check", "x:y", "--tolerance", "much"], "'much' is no number"),
        (["demo", "--steps", "few"], "'few' is no whole number"),
        (["bench", "x:y", "--steps", "0"], "0 is not positive"),
        (["fly"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_one_message(args, message, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(args)
    assert done.value.code == 2
    assert message in capsys.readouterr().err


def test_importing_the_library_leaves_the_devices_alone():
    program = "import shardstep, jax; jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr


def test_an_error_is_one_line_unless_a_traceback_is_asked_for(monkeypatch, capsys):
    def fail(args):
        raise ValueError("no such thing")

    monkeypatch.setattr(cli, "run_demo", fail)
    assert cli.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "shardstep: ValueError: no such thing" in said
    assert f"{__file__}:" in said and "(fail)" in said  # the user's own line, not ours
    with pytest.raises(ValueError, match="no such thing"):
        cli.main(["demo", "--traceback"])


def test_the_line_of_an_error_is_the_users_wherever_in_the_package_it_was_raised(monkeypatch, capsys):
    def fail(args):
        shardstep.shard(lambda state, batch: state, group="four")

    monkeypatch.setattr(cli, "run_demo", fail)
    assert cli.main(["demo"]) == 1
    assert f"{__file__}:{fail.__code__.co_firstlineno + 1} (fail)" in capsys.readouterr().err


@pytest.mark.parametrize("args", [("explain", f"{PROGRAMS}:mlp"), ("demo",)])
def test_a_report_that_cannot_be_written_is_said_before_the_work(main, tmp_path, args):
    for place, message in ((tmp_path / "nowhere" / "report.html", "no such directory"), (tmp_path, "is a directory")):
        status, out, err = main(*args, "--html", place)
        assert status == 2 and message in err and out == "" and "--traceback" not in err


@pytest.mark.slow
def test_demo_trains_both_ways_and_agrees(tmp_path):
    report = tmp_path / "demo.html"
    done = run("demo", "--steps", "3", "--devices", "4", "--html", report)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())  # rich wraps lines to the terminal
    assert "4 simulated replicas" in shown
    assert "optimizer state per replica" in shown
    assert "Same losses" in shown
    assert str(report) in shown and report.read_text().startswith("<!doctype html>")
    if importlib.util.find_spec("matplotlib") is None:
        assert "install matplotlib" in shown
    else:
        picture = report.with_suffix(".png")
        assert str(picture) in shown and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), [("resnet", "sgd"), ("mlp", "lion"), ("mlp", "lamb")])
@pytest.mark.thorough
def test_demo_of_other_models_and_optimizers(tmp_path, model, optimizer):
    done = run("demo", "--steps", "2", "--model", model, "--optimizer", optimizer, "--html", tmp_path / "demo.html")
    assert done.returncode == 0, done.stderr
    assert optimizer in done.stdout and "Same losses" in done.stdout


def test_an_unknown_optimizer_is_one_message(main):
    status, _, err = main("demo", "--optimizer", "nonsense")
    assert status == 1 and "adamw, sgd, lion" in err and "Traceback" not in err
