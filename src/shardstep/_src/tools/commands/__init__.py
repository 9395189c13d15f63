"""The commands of `shardstep`, one file each; `cli.py` reads their arguments."""
