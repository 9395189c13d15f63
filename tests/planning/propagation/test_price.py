"""What decisions cost while a program is decided: seconds, not bytes."""

import jax.numpy as jnp
import pytest

from shardstep._src.core.layout import REPLICATED, Array, Axis, Split
from shardstep._src.core.moves import layout_cost
from shardstep._src.machine.links import CHIPS, Ring
from shardstep._src.planning.propagation.memo import Memo
from shardstep._src.planning.propagation.price import Price

AXES = Axis(("hosts",), 4), Axis(("chips",), 4)
ARRAY = Array((64, 64), jnp.dtype("float32"))
CHIP = CHIPS["v5e"]
FAST = Ring(4, CHIP.link)
SLOW = Ring(4, CHIP.link, hosts=4, network=CHIP.network)
HELD = (Split(0), REPLICATED), (REPLICATED, Split(0))  # over hosts, over chips
WHOLE = (REPLICATED, REPLICATED)


def seconds(price, source):
    return price.move(source, WHOLE, ARRAY, AXES)


def test_the_same_bytes_cost_more_over_slower_links():
    assert layout_cost(HELD[0], WHOLE, ARRAY, AXES) == layout_cost(HELD[1], WHOLE, ARRAY, AXES)
    price = Price.of((SLOW, FAST))
    assert seconds(price, HELD[0]) == pytest.approx(seconds(price, HELD[1]) * FAST.rate / SLOW.rate)


def test_links_of_one_speed_rank_by_bytes_exactly():
    """Equal bytes are equal seconds to the last bit: no rounding breaks a tie."""
    price = Price.of((FAST, FAST))
    assert (
        seconds(price, HELD[0])
        == seconds(price, HELD[1])
        == layout_cost(HELD[0], WHOLE, ARRAY, AXES) * price.wire(1.0, 0)
    )


@pytest.mark.parametrize(("rings", "first"), [((SLOW, FAST), 1), ((FAST, SLOW), 0)])
def test_a_value_held_in_two_ways_is_gathered_over_the_faster_links(rings, first):
    memo = Memo(price=Price.of(rings))
    forms = memo.forms(HELD, HELD, None)
    assert forms.source(WHOLE, ARRAY, AXES, memo.price) == HELD[first]


def test_products_of_state_take_time_only_where_that_is_asked_for():
    from shardstep._src.core import compat

    dot, numbers = compat.primitive("dot_general"), {"dimension_numbers": (((1,), (0,)), ((), ()))}
    work = [
        p.product(dot, numbers, (ARRAY, ARRAY), (ARRAY,)) for p in (Price.of((FAST,)), Price.of((FAST,), CHIP.peak))
    ]
    assert work == [0.0, pytest.approx(2 * 64**3 / CHIP.peak.single)]
