"""What the closed original makes of a step: the TPU compiler's own automatic cross-replica sharding of weight update.

The paper's authors built it into the TPU compiler. It is still there, behind the flag
`xla_jf_auto_cross_replica_sharding`, for programs in *replica mode*: one program for every replica, collectives over
replicas (`num_replicas=N`, one partition), state marked `mhlo.parameter_replication = [true]`. JAX no longer writes
such programs, so this module does: it lowers a step for one replica, whose gradients are summed by a primitive of its
own, and marks the arguments. The compiler shards Adam only inside a loop, so the step is the body of a training loop,
and what is read is that body: what stands before and after it is paid once for the whole training.

    lowered = training_loop(step, state, batch, replicas=32)
    program = compiled(lowered, devices)
    print(program.body)                        # the HLO of one iteration
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import backend
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from shardstep._src.tools.hlo import inside_loops

FLAG = "xla_jf_auto_cross_replica_sharding"
ITERATIONS = 10

_sum = Primitive("sum_over_replicas")
_sum.def_abstract_eval(lambda x, *, replicas: x)


def _lower(context: Any, x: Any, *, replicas: int) -> Any:
    groups = ir.DenseIntElementsAttr.get(np.arange(replicas, dtype=np.int64).reshape(1, -1))
    reduce = stablehlo.AllReduceOp([x.type], [x], groups)
    scalar = ir.RankedTensorType.get([], x.type.element_type)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.ReturnOp([stablehlo.AddOp(*block.arguments).result])
    return reduce.results


mlir.register_lowering(_sum, _lower)


def sum_over_replicas(x: jax.Array, replicas: int) -> jax.Array:
    """Every replica's term added up, on every replica. Its gradient is the sum of everyone's gradients."""

    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        return _sum.bind(x, replicas=replicas)

    total.defvjp(lambda x: (total(x), None), lambda _, g: (total(g),))
    return total(x)


def training_loop(step: Callable[[Any, Any], Any], state: Any, batch: Any, replicas: int) -> Any:
    """The module of a loop over `step(state, batch) -> state`, whose state every replica holds alike; as shapes."""

    def train(state: Any, batch: Any) -> Any:
        return jax.lax.fori_loop(0, ITERATIONS, lambda _, state: step(state, batch), state)

    module = jax.jit(train, donate_argnums=0, keep_unused=True).lower(state, batch).compiler_ir("stablehlo")
    with module.context:
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), replicas)
        module.operation.attributes["mhlo.num_replicas"] = number
        (main,) = [op for op in module.body.operations if op.attributes["sym_name"].value == "main"]
        main.attributes["arg_attrs"] = _marked(main.attributes["arg_attrs"], len(jax.tree.leaves(state)))
    return module


def _marked(arguments: Any, state: int) -> Any:
    """The attributes of the arguments; the first `state` of them are the same on every replica."""
    marked = []
    for i, attributes in enumerate(arguments):
        named = {attribute.name: attribute.attr for attribute in attributes}
        if i < state:
            named["mhlo.parameter_replication"] = ir.ArrayAttr.get([ir.BoolAttr.get(True)])
        marked.append(ir.DictAttr.get(named))
    return ir.ArrayAttr.get(marked)


@dataclass(frozen=True)
class Program:
    text: str  # the whole module
    memory: Any

    @property
    def body(self) -> str:
        """One iteration of the training loop, as a module."""
        return inside_loops(self.text)


def compiled(module: Any, devices: Sequence[Any], shard: bool = True) -> Program:
    """`shard=False`: the same program, left replicated."""
    options = backend.get_compile_options(
        num_replicas=len(devices),
        num_partitions=1,
        device_assignment=np.array([d.id for d in devices]).reshape(-1, 1),
        env_options_overrides={FLAG: "true" if shard else "false"},
    )
    executable = devices[0].client.compile(module, _listed(devices), options)
    (program,) = executable.hlo_modules()
    return Program(program.to_string(), executable.get_compiled_memory_stats())


def _listed(devices: Sequence[Any]) -> Any:
    from jaxlib import _jax

    return _jax.DeviceList(tuple(devices))
