"""Thin adapters for frameworks whose steps mutate objects. `shardstep.nnx` and `shardstep.keras` import them on use."""
