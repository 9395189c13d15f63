"""The table of chips: how fast they talk, compute and read their memory, how much of it they have. Published figures.

The model of a collective is the plain one, `messages x latency + bytes / bandwidth`. It is made to compare: to choose a
group, a threshold, an order of axes. It does not promise a step time. (`planning/costs.py` adds up a whole step.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

_MICRO = 1e-6
_GIGA = 1e9
_TERA = 1e12
_GIB = 2**30


class Link(NamedTuple):
    """What joins two neighbours."""

    name: str
    bandwidth: float  # bytes a second, one way
    latency: float  # seconds for a hop
    start: float = 0.0  # seconds to begin a collective
    torus: bool = False  # a replica has two neighbours along the axis, and sends to both at once


class Peak(NamedTuple):
    """Floating-point operations a second in large products, by the width of the operands, at JAX's default precision.

    So float32 means one bfloat16 pass on a TPU and TF32 on a GPU.
    """

    half: float  # bfloat16 and float16
    single: float
    double: float
    byte: float  # int8 and float8

    def of(self, dtype: Any) -> float:
        width = jnp.dtype(dtype).itemsize / (2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
        return self.byte if width <= 1 else self.half if width <= 2 else self.single if width <= 4 else self.double


class Chip(NamedTuple):
    """One device (a core, where a chip has two)."""

    name: str
    memory: float  # bytes a second, read or written
    capacity: float  # bytes of that memory; infinite where programs share it (CPU)
    peak: Peak
    link: Link  # to its neighbours: torus links, NVLink, shared memory
    network: Link  # to other hosts (GPU), other slices (TPU)
    wraps: int = 0  # a torus axis is closed to a ring if its length is a multiple of this; 0: never
    source: str = ""
    host: float = 16 * _GIGA  # bytes a second to the memory of the host, one way ("How to Scale Your Model", part 2)
    near: int = 0  # bytes: smaller results of a collective stay near the core (see in_place.py)


_HOP = 1 * _MICRO  # "How to Scale Your Model" (jax-ml.github.io/scaling-book), part 3: about 1 us for a hop
_TPU_START = 1 * _MICRO
_DCN = Link("data-centre network", 6.25 * _GIGA, 50 * _MICRO, 50 * _MICRO)  # same book: 6.25 GB/s for a v5p chip


def _ici(gigabytes: float) -> Link:
    return Link("ICI", gigabytes * _GIGA, _HOP, _TPU_START, torus=True)


# NCCL's own cost model (src/graph/tuning.cc, ring, simple protocol): 8.4 us to start, 3.4 us an NVLink hop, 14 us a
# network hop.
def _nvlink(gigabytes: float) -> Link:
    return Link("NVLink", gigabytes * _GIGA, 3.4 * _MICRO, 8.4 * _MICRO)


def _infiniband(gigabytes: float) -> Link:
    return Link("InfiniBand", gigabytes * _GIGA, 14 * _MICRO, 8.4 * _MICRO)


_DESIGN = 'Norrie et al., "The Design Process for Google\'s Training Chips: TPUv2 and TPUv3", IEEE Micro 2021'
_DOCS = "cloud.google.com/tpu/docs, page of the version: links per chip and both ways, here per link and one way"
_HALF_OF_VMEM = 64 * 2**20  # v5e and v6e have 128 MiB


def _mxu(teraflops: float, byte: float = 1) -> Peak:
    """A TPU multiplies float32 in bfloat16 unless it is told otherwise, and float64 in many passes (by emulation: a
    figure to keep it out of choices, not a measurement). `byte`: how much faster it is in int8."""
    return Peak(teraflops * _TERA, teraflops * _TERA, teraflops / 100 * _TERA, byte * teraflops * _TERA)


def _tensor_cores(half: float, tf32: float, double: float, byte: float) -> Peak:
    return Peak(half * _TERA, tf32 * _TERA, double * _TERA, byte * _TERA)


# Dense products; datasheets of NVIDIA give the figures with sparsity, which are twice as large.
_PCIE4, _PCIE5 = 32 * _GIGA, 64 * _GIGA  # 16 lanes, one way: the same datasheets give both ways together
_HOPPER = _tensor_cores(989, 494, 67, 1979)
_CORE = "a core has half of the chip"
CHIPS = {
    "v2": Chip("TPU v2", 350 * _GIGA, 8 * _GIB, _mxu(23), _ici(62), _DCN, 16, f"{_DESIGN}: {_CORE}"),
    "v3": Chip("TPU v3", 450 * _GIGA, 16 * _GIB, _mxu(61.5), _ici(82), _DCN, 32, f"{_DESIGN}: {_CORE}"),
    "v4": Chip("TPU v4", 1228 * _GIGA, 32 * _GIB, _mxu(275), _ici(50), _DCN, 4, 'Jouppi et al., "TPU v4", ISCA 2023'),
    "v5e": Chip("TPU v5 lite", 819 * _GIGA, 16 * _GIB, _mxu(197, 2), _ici(50), _DCN, 16, _DOCS, near=_HALF_OF_VMEM),
    "v5p": Chip("TPU v5", 2765 * _GIGA, 95 * _GIB, _mxu(459, 2), _ici(100), _DCN, 4, _DOCS),
    "v6e": Chip(
        "TPU v6 lite", 1640 * _GIGA, 32 * _GIB, _mxu(918, 2), _ici(100), _DCN, 16, _DOCS, _PCIE4, _HALF_OF_VMEM
    ),
    "tpu7x": Chip("TPU7x", 3690 * _GIGA, 96 * _GIB, _mxu(1153, 2), _ici(100), _DCN, 4, f"{_DOCS}; {_CORE}"),
    "a100": Chip(
        "A100",
        2039 * _GIGA,
        80 * _GIGA,
        _tensor_cores(312, 156, 19.5, 624),
        _nvlink(300),
        _infiniband(25),
        source="NVIDIA A100 80GB and DGX A100 datasheets",
        host=_PCIE4,
    ),
    "h100": Chip(
        "H100",
        3350 * _GIGA,
        80 * _GIGA,
        _HOPPER,
        _nvlink(450),
        _infiniband(50),
        source="NVIDIA H100 SXM and DGX H100 datasheets",
        host=_PCIE5,
    ),
    "h200": Chip(
        "H200",
        4800 * _GIGA,
        141 * _GIGA,
        _HOPPER,
        _nvlink(450),
        _infiniband(50),
        source="NVIDIA H200 SXM and DGX H200 datasheets",
        host=_PCIE5,
    ),
    "b200": Chip(
        "B200",
        8000 * _GIGA,
        180 * _GIGA,
        _tensor_cores(2250, 1125, 37, 4500),
        _nvlink(900),
        _infiniband(50),
        source="NVIDIA DGX B200 datasheet",
        host=_PCIE5,
    ),
    # One of 8 simulated devices on 2 cores: psum_scatter + all_gather of 32 B to 16 MB (jax 0.12, 2026-11-16), products
    # of 512 x 512 on all devices at once (least CPU time of two cores, jax 0.10.2, 2026-11-19). Given, not measured in
    # each process: processes of one run must make the same plan.
    "cpu": Chip(
        "cpu",
        2.5 * _GIGA,
        math.inf,
        Peak(40 * _GIGA, 40 * _GIGA, 20 * _GIGA, 1 * _GIGA),
        Link("shared memory", 1.2 * _GIGA, 20 * _MICRO, 100 * _MICRO),
        Link("network", 1.2 * _GIGA, 50 * _MICRO, 100 * _MICRO),
        source="measured by shardstep's developers",
    ),
}

_KINDS = {"tpu v5e": "v5e", "tpu v5p": "v5p", "tpu v6e": "v6e", **{c.name.lower(): k for k, c in CHIPS.items()}}


def chip_of(platform: str, kind: str) -> Chip:
    """The figures for a device kind; for one that is not listed, those of the nearest that is."""
    name = kind.lower()
    if name in _KINDS:
        return CHIPS[_KINDS[name]]
    for key in CHIPS:  # "NVIDIA H100 80GB HBM3"
        if key in name:
            return CHIPS[key]
    nearest = {"tpu": "v5p", "gpu": "h100", "cuda": "h100", "rocm": "h100"}.get(platform, "cpu")
    return CHIPS[nearest]._replace(source=f"figures of {nearest}: {kind!r} is not listed")


@dataclass(frozen=True)
class Ring:
    """The replicas along one data axis, as data travels between them."""

    size: int
    link: Link
    closed: bool = False  # a torus axis whose ends are joined
    hosts: int = 1  # or slices of a TPU: how many machines it crosses
    network: Link | None = None  # what joins those

    @property
    def rate(self) -> float:
        """Bytes a second that each replica passes on. A closed torus axis is driven both ways round."""
        inside = self.link.bandwidth * (2 if self.link.torus and self.closed else 1)
        if self.network is None or self.hosts == 1:
            return inside
        return min(inside, self.network.bandwidth * self.size / self.hosts)  # each replica of a host has its own port

    @property
    def delay(self) -> float:
        """Seconds until the last replica has heard of the first."""
        hops = self.size // 2 if self.closed else self.size - 1
        if self.network is None or self.hosts == 1:
            return hops * self.link.latency
        return max(hops - self.hosts, 0) * self.link.latency + self.hosts * self.network.latency

    @property
    def start(self) -> float:
        return self.network.start if self.network and self.hosts > 1 else self.link.start


PASSES = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}


def collective_time(kind: str, nbytes: float, *rings: Ring) -> float:
    """Seconds for one collective on `nbytes`: all that is reduced, before scattering or after gathering.

    Over several rings at once all their links work together (what the TPU compiler does for an all-reduce); a
    collective along one ring after the other is the sum of single ones.
    """
    n = math.prod(r.size for r in rings)
    share = (n - 1) / n / (n if kind == "all-to-all" else 1)
    return sent_time(kind, PASSES.get(kind, 0.0) * share * nbytes, *rings)


def sent_time(kind: str, sent: float, *rings: Ring) -> float:
    """The same for a collective in which each replica sends this number of bytes."""
    rings = tuple(r for r in rings if r.size > 1)
    if not rings or kind not in PASSES:
        return 0.0
    bandwidth = sum(r.rate for r in rings)
    delay = sum(r.delay for r in rings)
    return max(r.start for r in rings) + sent / bandwidth + PASSES[kind] * delay
