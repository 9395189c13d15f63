"""The command line: `shardstep demo`.

Each command is a function from parsed arguments to an exit status. JAX fixes the number of devices when it first
touches them, so a command asks for its simulated devices before anything else; importing the library never does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.traceback:
            raise
        print(f"shardstep: {type(error).__name__}: {error}", file=sys.stderr)
        print("(add --traceback to see where)", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")

    top = argparse.ArgumentParser(
        prog="shardstep", description="Shard the weight update of a JAX training step across its replicas."
    )
    top.add_argument("--version", action="version", version=f"shardstep {installed_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", parents=[common], help="train a small transformer, plain and sharded, side by side"
    )
    demo.add_argument("--steps", type=positive, default=40, help="training steps (default: %(default)s)")
    demo.add_argument("--devices", type=positive, default=8, help="simulated CPU devices (default: %(default)s)")
    demo.set_defaults(run=run_demo)
    return top


def run_demo(args: argparse.Namespace) -> int:
    simulate_devices(args.devices)
    from .demo.run import demo  # after the devices are set: nothing before this line may touch them

    return 0 if demo(args.steps) else 1


def simulate_devices(count: int) -> None:
    """`count` CPU devices in this process, on any machine."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def installed_version() -> str:
    try:
        return version("shardstep")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "(not installed)"
