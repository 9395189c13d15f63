"""A primitive that this JAX does not have must not lose its rule in silence."""

import jax
import pytest

from shardstep import ShardstepError
from shardstep._src import rules
from shardstep._src.core import compat
from shardstep._src.core.compat import Lifetime
from shardstep._src.rules import contract

FUTURE = (99, 0)


def test_an_unknown_name_is_an_error():
    with pytest.raises(ShardstepError, match="no primitive 'reshapee'"):
        compat.primitives("reshape reshapee")


def test_a_primitive_that_left_its_module_is_an_error(monkeypatch):
    monkeypatch.setitem(compat._HOMES, "tie", "lax.parallel")
    with pytest.raises(ShardstepError, match="no primitive 'tie'"):
        compat.primitive("tie")
    monkeypatch.setitem(compat._HOMES, "tie", "lax.no_such_module")
    with pytest.raises(ShardstepError, match="no primitive 'tie'"):
        compat.primitive("tie")


@pytest.mark.parametrize("lifetime", [Lifetime(since=FUTURE), Lifetime(until=(0, 10))])
def test_only_a_lifetime_excuses_an_absent_primitive(monkeypatch, lifetime):
    monkeypatch.setitem(compat._LIFETIMES, "imagined", lifetime)
    assert compat.primitive("imagined") is None
    assert compat.primitives("add imagined") == [compat.primitive("add")]


def test_a_primitive_must_be_there_during_its_lifetime(monkeypatch):
    monkeypatch.setitem(compat._LIFETIMES, "imagined", Lifetime(since=(0, 10), until=FUTURE))
    with pytest.raises(ShardstepError, match="imagined"):
        compat.primitive("imagined")


def test_lifetimes_agree_with_this_jax():
    """Neither excuses what is here, nor promises what is not."""
    here = {name: compat.primitive(name) is not None for name in compat._LIFETIMES}
    version = jax.__version_info__[:2]
    # between the versions that we test, a primitive may have come earlier than is known
    expected = {name: life.includes(version) for name, life in compat._LIFETIMES.items()}
    assert here == expected or version == (0, 11)


@pytest.mark.parametrize("name", sorted(compat._HOMES))
def test_what_jax_does_not_export_is_found_where_it_is_defined(name):
    assert compat.primitive(name) is not None


def test_a_rule_needs_a_primitive_of_its_own():
    with pytest.raises(ShardstepError, match="does not have"):
        contract.register(rules.shape.identity, None)
    with pytest.raises(ShardstepError, match="add has two rules"):
        contract.register(rules.shape.identity, compat.primitive("add"))
