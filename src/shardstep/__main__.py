"""`python -m shardstep` is the command `shardstep`."""

from shardstep._src.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
