"""What a user did wrong, said in the user's terms."""

from __future__ import annotations


class ShardstepError(ValueError):
    """A step, mesh or argument that cannot be sharded as asked. The message says what to do."""


class IndivisibleBatch(ShardstepError):
    """The replicas do not share the examples evenly. `examples`: input leaf -> the dimension that holds them."""

    def __init__(self, examples: dict[int, int], message: str):
        super().__init__(message)
        self.examples = examples
