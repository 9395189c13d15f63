"""Train on one process or on many: the same script.

    python examples/distributed.py                            # alone, on all devices of this machine
    srun --ntasks-per-node=4 python examples/distributed.py   # SLURM: JAX finds out by itself
    mpirun -n 4 python examples/distributed.py                # Open MPI: the same
    python examples/distributed.py --coordinator 10.0.0.1:1234 --processes 2 --process 0    # by hand, once on each

Run it again and it goes on from the newest whole checkpoint, on as many processes and devices as there are then. On
SIGTERM it saves, and all processes stop after the same step.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardstep

EXAMPLES = 48  # in a batch, over all processes
WIDTH = 256
OPTIMIZER = optax.adamw(1e-3)


def main() -> None:
    options = arguments()
    join_cluster(options)
    step = shardstep.shard(train_step)  # over the devices of all processes
    batch = jax.eval_shape(lambda: whole_batch(0))
    with shardstep.training(
        options.checkpoints,
        step,
        create_state,
        batch,
        save_every=options.save_every,
        background=not options.wait_for_saves,
        show_every=options.show_every,
    ) as run:
        for i in run.steps(options.steps):
            run.state, loss = step(run.state, step.global_batch(own_part(i)))
            run.log(loss=loss)
    if jax.process_index() == 0:
        print("stopped" if run.preempted else "done", flush=True)


def join_cluster(options: argparse.Namespace) -> None:
    """Become one of many processes, where there are many.

    A process that dies is noticed after `heartbeat` seconds at the latest, and then every process ends with an error.
    """
    timeouts = dict(heartbeat_timeout_seconds=options.heartbeat, shutdown_timeout_seconds=2 * options.heartbeat)
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process, **timeouts)
        return
    try:
        jax.distributed.initialize(**timeouts)
    except ValueError as error:  # JAX sees no cluster around it
        if "coordinator_address" not in str(error):
            raise


# -- any training step, written for one device ------------------------------------------------------------------------


def create_state() -> dict:
    keys = jax.random.split(jax.random.key(0), 2)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return {"params": params, "optimizer": OPTIMIZER.init(params), "step": 0}


def train_step(state: dict, batch: dict) -> tuple[dict, jax.Array]:
    def loss_of(params: list) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params[0]) @ params[1] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    changes, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}, loss


# -- any source of data that can be asked for a part -------------------------------------------------------------------


def whole_batch(i: int) -> dict:
    key = jax.random.fold_in(jax.random.key(1), i)
    x = jax.random.normal(key, (EXAMPLES, WIDTH))
    return {"x": x, "y": jnp.sin(x)}


def own_part(i: int) -> dict:
    """The examples of this process. The batch of a step is the same however many processes share it."""
    size = EXAMPLES // jax.process_count()
    start = jax.process_index() * size
    return jax.tree.map(lambda x: np.asarray(x)[start : start + size], whole_batch(i))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", default="/tmp/shardstep-example", help="a directory that all processes see")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--wait-for-saves", action="store_true", help="do not train while a checkpoint is written")
    parser.add_argument("--show-every", type=float, default=0, help="seconds between two lines of progress")
    parser.add_argument("--heartbeat", type=int, default=100, help="seconds until a silent process counts as dead")
    parser.add_argument("--devices", type=int, help="simulated CPU devices in each process")
    parser.add_argument("--coordinator", help="host:port of process 0, where JAX finds no cluster by itself")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
