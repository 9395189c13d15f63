"""`shardstep demo`: the same training step under `jax.jit` and under `shardstep.shard`."""
