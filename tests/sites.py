"""What tests of rules ask about: small operands, and an equation as its rule sees it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardstep._src.core import compat
from shardstep._src.core.layout import Array
from shardstep._src.rules import Site


def values(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).integers(1, 10, shape), dtype)


def indices(*shape, below):
    return jnp.asarray(np.random.default_rng(1).integers(0, below, shape), np.int32)


def site_of(name, fun, *args, n=2, wants=()):
    """The first equation of that name, as a rule sees it."""

    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            if "jaxpr" in eqn.params:
                yield from equations(compat.open_jaxpr(eqn.params["jaxpr"])[0])
            yield eqn

    jaxpr = compat.open_jaxpr(jax.make_jaxpr(fun)(*args))[0]
    eqn = next(e for e in equations(jaxpr) if e.primitive is compat.primitive(name))
    arrays = [tuple(Array(v.aval.shape, v.aval.dtype) for v in vs) for vs in (eqn.invars, eqn.outvars)]
    return Site(eqn.primitive, eqn.params, *arrays, n, wants)
