"""One process of a PyTorch data-parallel run of the transformer of `workloads.py`. Runs in PyTorch's environment.

    python torch_worker.py --variant ddp-fused --process 0 --processes 2 --port 1234 --start start.npz

Started by `against_torch.py`, which holds the other end of its pipes. PyTorch in the form that its own documentation
recommends and, where that leaves a choice, the faster one: `nn.Linear`, `scaled_dot_product_attention`, `nn.RMSNorm`,
gradients as views into DDP's buckets, gradients set to None, FSDP2 per layer that keeps the weights until the backward
pass is done (the root's default, and less to send).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turns import pin, serve

# --- the model ------------------------------------------------------------------------------------------------------


def model(start: Mapping[str, Any], heads: int) -> Any:
    """The transformer of `workloads.py`, with the given weights."""
    import torch
    from torch import nn
    from torch.nn import functional

    def linear(weight: Any) -> nn.Linear:
        """`workloads.py` computes `x @ w`; `nn.Linear` holds the transpose."""
        made = nn.Linear(*weight.shape, bias=False)
        made.weight.data.copy_(torch.from_numpy(weight.T.copy()))
        return made

    def norm(scale: Any) -> nn.RMSNorm:
        made = nn.RMSNorm(scale.shape, eps=1e-6)
        made.weight.data.copy_(torch.from_numpy(scale))
        return made

    class Layer(nn.Module):
        def __init__(self, weights: Callable[[str], Any]):
            super().__init__()
            self.norm_attention, self.norm_mlp = norm(weights("norm_attention")), norm(weights("norm_mlp"))
            self.qkv, self.out = linear(weights("qkv")), linear(weights("out"))
            self.up, self.down = linear(weights("up")), linear(weights("down"))

        def attention(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], heads, -1).transpose(1, 2).chunk(3, dim=-1)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(x.shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.norm_attention(x))
            return x + self.down(functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = sum(name.endswith("/qkv") for name in start)
            self.embedding = nn.Embedding.from_pretrained(torch.from_numpy(start["embedding"]), freeze=False)
            self.layers = nn.ModuleList(Layer(lambda name, i=i: start[f"layers/{i}/{name}"]) for i in range(count))
            self.norm, self.unembedding = norm(start["norm"]), linear(start["unembedding"])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens[:, :-1])
            for layer in self.layers:
                x = layer(x)
            logits = self.unembedding(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Transformer()


# --- the ways to train it -------------------------------------------------------------------------------------------


def ddp(net: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)


def fsdp2(net: Any) -> Any:
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(net, mesh=mesh, reshard_after_forward=False)


def adamw(parameters: Iterator[Any], **choice: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4, eps=1e-8, **choice)


def zero(parameters: Iterator[Any], **choice: Any) -> Any:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, weight_decay=1e-4, eps=1e-8, **choice
    )


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "ddp": (ddp, adamw),
    "ddp-zero": (ddp, zero),
    "fsdp2": (fsdp2, adamw),
}


@dataclass
class Training:
    net: Any
    optimizer: Any
    tokens: Any
    parts: dict[str, float] = field(default_factory=dict)

    def step(self) -> float:
        import torch

        started = time.perf_counter()
        loss = self.net(self.tokens)
        loss.backward()
        differentiated = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.parts = {
            "forward_backward": differentiated - started,
            "clip_and_update": time.perf_counter() - differentiated,
        }
        return loss.item()

    def facts(self) -> dict[str, Any]:
        import torch

        inner = getattr(self.optimizer, "optim", self.optimizer)  # of the redundancy-free one: its own part
        held = [x for state in inner.state.values() for x in state.values() if torch.is_tensor(x)]
        return {
            "versions": {"torch": torch.__version__},
            "optimizer_bytes": sum(_local(x).nbytes for x in held if x.dim()),
            "weight_bytes": sum(_local(p).nbytes for p in self.net.parameters()),
        }


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def create(args: argparse.Namespace) -> Training:
    import numpy as np
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=args.process, world_size=args.processes
    )
    start = np.load(args.start)
    way, fused = args.variant.removesuffix("-fused"), args.variant.endswith("-fused")
    spread, optimizer = WAYS[way]
    net = spread(model(start, int(start["heads"])))
    tokens = torch.from_numpy(start["batch"][args.process : args.process + 1].astype(np.int64))
    choice = {"fused": True} if fused else {"foreach": False}  # what `None` means on the CPU
    return Training(net, optimizer(net.parameters(), **choice), tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, choices=[f"{w}{f}" for w in WAYS for f in ("", "-fused")])
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--start", required=True, help="weights and tokens, as `jax_worker.py --export` writes them")
    parser.add_argument("--core", type=int, help="stay on this core")
    args = parser.parse_args()
    pin(args.core)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(lambda: create(args))


if __name__ == "__main__":
    main()
