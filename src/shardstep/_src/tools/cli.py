"""The command line: `shardstep demo | explain | check | bench`.

Each command is a function from parsed arguments to an exit status: 0, or 1 where the answer is no or something failed,
or 2 where the command line itself is wrong. JAX fixes the number of devices when it first touches them, so a command
asks for its simulated devices before anything else; importing the library never does.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `shardstep explain ... | head`
        sys.stderr.close()  # or Python complains about the pipe once more on its way out
        return 0
    except Exception as error:
        from .commands.target import UsageError

        if args.traceback:
            raise
        print(f"shardstep: {describe(error)}", file=sys.stderr)
        if isinstance(error, UsageError):
            return 2
        print(f"({user_line(error)}add --traceback to see where)", file=sys.stderr)
        return 1


def describe(error: Exception) -> str:
    """One message: our own errors speak for themselves, others say what they are."""
    from ..core.errors import ShardstepError

    return str(error) if isinstance(error, ShardstepError) else f"{type(error).__name__}: {error}"


def user_line(error: Exception) -> str:
    """The innermost line of the user's own program that an error came through, if there is one."""
    package = Path(__file__).parents[2]
    ours = (str(package), sysconfig.get_path("stdlib"), "<")  # the virtual environment's packages aside
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours) and "-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name}); " if frames else ""


EXPLAIN = """\
Says before training starts what shardstep will do with a step. A verdict first: does it fit, what is kept and sent
before and after, what was not sharded and why. Then the leaves that hold most and what is sent, with your source lines.
It works from shapes alone: no weights are created.

PROGRAM names a function without arguments that returns (step, example_args); arrays or jax.ShapeDtypeStructs.
"""

EXPLAIN_EXAMPLES = """\
examples:
  shardstep explain train.py:example                        8 simulated devices
  shardstep explain train.py:example --replicas 1024        a cluster you do not have
  shardstep explain train.py:example --topology v5e:16x16   or a TPU pod, with predicted times
  shardstep explain train.py:example --memory 16GiB         on devices of this size
  shardstep explain train.py:example --weights sharded      if weights were kept sharded, too
  shardstep explain train.py:example --html report.html     the same as a page
  shardstep explain mypackage.train:example --json | jq .state_bytes
"""

CHECK = """\
Runs a step plain and sharded from the same arguments and compares every output leaf. Exit status 1 if a leaf differs by
more than the tolerance: floating-point sums may be formed in another order, nothing else may change.
"""

CHECK_EXAMPLES = """\
examples:
  shardstep check train.py:example
  shardstep check train.py:example --devices 4 --steps 10 --tolerance 1e-5
"""

BENCH = """\
Runs a step in four ways, one step of each in turn: replicated under jax.jit, with the optimizer's state annotated by
hand (ZeRO-1), and under shardstep with its weights replicated and sharded. Says what a step of each takes, holds and
sends. Exit status 1 if their losses differ. Simulated devices share the cores of this machine, so ratios count, not
milliseconds.
"""

BENCH_EXAMPLES = """\
examples:
  shardstep bench train.py:example
  shardstep bench train.py:example --devices 4 --steps 20 --json rows.json
"""

DEMO = """\
Trains a small model twice on simulated devices, under jax.jit and under shardstep.shard, and compares speed, memory and
losses. Leaves a report (HTML) and a plot of the losses (PNG, if matplotlib is installed).
"""

DEMO_EXAMPLES = """\
examples:
  shardstep demo
  shardstep demo --model resnet --optimizer sgd --steps 20
  shardstep demo --optimizer lamb --html lamb.html          any optimizer of optax, if that is installed
"""


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")

    top = argparse.ArgumentParser(
        prog="shardstep",
        description="Shard the weight update of a JAX training step across its replicas.",
        epilog="exit status: 0 fine; 1 the programs differ, or an error; 2 a wrong command line",
    )
    top.add_argument("--version", action="version", version=f"shardstep {installed_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: str, help: str, description: str, examples: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            parents=[common],
            help=help,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=lambda args: globals()[run](args))
        return made

    explain = command("explain", "run_explain", "what shardstep will do, before it does", EXPLAIN, EXPLAIN_EXAMPLES)
    explain.add_argument("program", metavar="PROGRAM", help="path.py:factory or module:factory")
    where = explain.add_mutually_exclusive_group()
    where.add_argument("--devices", type=positive, default=8, help="simulated CPU devices (default: %(default)s)")
    where.add_argument("--replicas", type=positive, help="plan for this number of replicas, which need not exist")
    where.add_argument(
        "--topology", metavar="NAME", help="plan for a machine: v5e:16x16, v5p:4x4x4, h200:8x8 (hosts x GPUs)"
    )
    explain.add_argument("--weights", choices=("auto", "replicated", "sharded"), help="how weights are kept at rest")
    explain.add_argument("--memory", type=memory, metavar="SIZE", help="what a device may use: 16GiB, 80GB, 2e10")
    explain.add_argument("--all", action="store_true", help="every leaf and every collective, not groups of them")
    explain.add_argument("--compile", action="store_true", help="ask the TPU compiler, too (with a TPU's --topology)")
    explain.add_argument("--json", action="store_true", help="the whole plan as JSON")
    explain.add_argument("--html", metavar="FILE", help="write the report as one HTML file")

    check = command("check", "run_check", "run a step plain and sharded, and compare", CHECK, CHECK_EXAMPLES)
    check.add_argument("program", metavar="PROGRAM", help="path.py:factory or module:factory")
    check.add_argument("--devices", type=positive, default=8, help="simulated CPU devices (default: %(default)s)")
    check.add_argument("--steps", type=positive, default=3, help="steps to run (default: %(default)s)")
    check.add_argument(
        "--tolerance", type=tolerance, default=1e-3, help="largest relative difference (default: %(default)s)"
    )

    bench = command("bench", "run_bench", "time a step against the alternatives", BENCH, BENCH_EXAMPLES)
    bench.add_argument("program", metavar="PROGRAM", help="path.py:factory or module:factory")
    bench.add_argument("--devices", type=positive, default=8, help="simulated CPU devices (default: %(default)s)")
    bench.add_argument("--steps", type=positive, default=10, help="measured steps of each (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write the figures to this file, a list of one object for each")

    demo = command("demo", "run_demo", "train a small model, plain and sharded, side by side", DEMO, DEMO_EXAMPLES)
    demo.add_argument("--steps", type=positive, default=40, help="training steps (default: %(default)s)")
    demo.add_argument("--devices", type=positive, default=8, help="simulated CPU devices (default: %(default)s)")
    demo.add_argument("--model", choices=("transformer", "resnet", "mlp"), default="transformer")
    demo.add_argument("--optimizer", metavar="NAME", default="adamw", help="adamw, sgd, lion, or one of optax's")
    demo.add_argument("--html", metavar="FILE", default="shardstep-demo.html", help="the report (default: %(default)s)")
    return top


def run_explain(args: argparse.Namespace) -> int:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # read when libtpu is loaded: there is no TPU to ask about
    simulate_devices(machine_size(args.topology) if args.topology else args.replicas or args.devices)
    from .commands.explain import Request, explain

    asked = {"weights": args.weights, "memory": args.memory}
    settings = {name: value for name, value in asked.items() if value is not None}
    return explain(Request(args.program, args.topology, args.all, args.json, args.html, args.compile, settings))


def machine_size(name: str) -> int:
    from ..core.errors import ShardstepError
    from ..machine.topology import describe
    from .commands.target import UsageError

    try:
        return describe(name).replicas
    except ShardstepError as error:
        raise UsageError(str(error)) from error


def run_check(args: argparse.Namespace) -> int:
    simulate_devices(args.devices)
    from .commands.check import check

    return check(args.program, args.steps, args.tolerance)


def run_bench(args: argparse.Namespace) -> int:
    simulate_devices(args.devices)
    from .commands.bench import bench

    return bench(args.program, args.steps, args.json)


def run_demo(args: argparse.Namespace) -> int:
    simulate_devices(args.devices)
    from .demo.run import demo

    return 0 if demo(args.steps, args.model, args.optimizer, args.html) else 1


def simulate_devices(count: int) -> None:
    """`count` CPU devices in this process, on any machine."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def memory(text: str) -> int:
    """`16GiB` as bytes."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS or found[1].count(".") > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 16GiB, 80GB or a number of bytes")
    nbytes = int(float(found[1]) * _UNITS[found[2]])
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return nbytes


def tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{number} is no tolerance")
    return number


def installed_version() -> str:
    try:
        return version("shardstep")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "(not installed)"
