"""What the planner remembers: equal blocks of state and of examples are two different things to remember."""

import jax.numpy as jnp
import pytest

from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Split, origins
from shardstep._src.core.program import Kinds, Program
from shardstep._src.core.schedule import Preference
from shardstep._src.planning.propagation.boundary import Boundary
from shardstep._src.planning.propagation.memo import Memo, Table

STATE, EXAMPLES = Split(0), Split(0, batch=True)
PROGRAM = Program((), (), ())

KEYS = {
    "a placement": lambda split: split,
    "a layout": lambda split: (REPLICATED, split),
    "layouts of several values": lambda split: (3, ((PARTIAL,), (split,)), None),
    "a preference": lambda split: Preference((split,), full=True),
    "preferences by axis": lambda split: ((Preference(), Preference((Split(1), split))), True),
    "what enters a body": lambda split: (PROGRAM, Boundary(((split,),), (None,))),
    "what leaves a body": lambda split: (PROGRAM, Boundary((), ((split,), None))),
    "what readers see": lambda split: (PROGRAM, Boundary((), (), seen=((split,),))),
    "what the surroundings want": lambda split: (PROGRAM, Boundary((), (), outside=((Preference((split,)),),))),
    "what the step draws itself": lambda split: (PROGRAM, Boundary((), (), drawn=((8, (split,)),))),
    "a named tuple": lambda split: Array((split,), jnp.float32),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_equal_blocks_of_another_origin_are_another_key(key):
    table = Table()
    assert key(STATE) == key(EXAMPLES)
    assert table.get(key(STATE), lambda: "state") == "state"
    assert table.get(key(EXAMPLES), lambda: "examples") == "examples"
    assert table.get(key(STATE), lambda: "found out again") == "state"


def test_origins_are_in_the_order_of_the_splits():
    assert origins((STATE, (EXAMPLES, Split(1)))) != origins((EXAMPLES, (STATE, Split(1))))
    assert origins((REPLICATED, 3, None), PROGRAM) == ()


def test_what_is_known_of_values_is_one_object_for_each_origin():
    memo = Memo(Kinds())
    wanted = memo.preferences((Preference((STATE,)),))
    assert memo.preferences((Preference((STATE,)),)) is wanted
    assert memo.preferences((Preference((EXAMPLES,)),)) is not wanted
    held = memo.forms(((STATE,),), ((STATE,),), wanted)
    assert memo.forms(((STATE,),), ((STATE,),), wanted) is held
    assert memo.forms(((EXAMPLES,),), ((STATE,),), wanted) is not held
    assert memo.forms(((STATE,),), ((EXAMPLES,),), wanted) is not held
