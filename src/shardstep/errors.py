"""What a user did wrong, said in the user's terms."""

from __future__ import annotations


class ShardstepError(ValueError):
    """A step, mesh or argument that cannot be sharded as asked. The message says what to do."""
