"""Which replica owns which row: everybody has about as much to do."""

import pytest

from shardstep._src.capture.slots import balanced


def loads(stacks, n):
    """What each replica has to do, by its slots."""
    found = [0.0] * n
    for (_, cost), slots in zip(stacks, balanced(stacks, n)[0], strict=True):
        each = len(slots) // n
        for r in range(n):
            found[r] += cost * sum(row is not None for row in slots[r * each : (r + 1) * each])
    return found


@pytest.mark.parametrize("stacks", [[(3, 1.0), (3, 1.0)], [(1, 5.0), (4, 2.0), (3, 1.0)], [(8, 1.0)]])
def test_matrices_of_several_shapes_are_on_different_replicas(stacks):
    total = sum(rows for rows, _ in stacks)
    assert sum(load > 0 for load in loads(stacks, 8)) == total


def test_the_longest_come_first():
    """Twelve layers of four shapes, costs as of Muon: 4400 would be even."""
    layers = [(12, 700.0), (12, 300.0), (12, 900.0), (12, 900.0)]
    found = loads(layers, 8)
    assert max(found) <= 1.05 * sum(found) / 8
    assert max(loads(layers, 64)) == 900.0


def test_whoever_has_most_to_do_is_known():
    stacks = [(3, 1.0), (1, 9.0)]
    busiest = balanced(stacks, 4)[1]
    assert loads(stacks, 4)[busiest] == 9.0


@pytest.mark.parametrize(("rows", "n"), [(6, 8), (6, 4), (3, 5), (16, 8), (1, 3), (9, 1)])
def test_every_row_has_one_slot_in_order(rows, n):
    ((slots,), _) = balanced([(rows, 1.0)], n)
    assert [row for row in slots if row is not None] == list(range(rows))
    assert len(slots) == -(-rows // n) * n


def test_neighbours_have_equally_many():
    """Replicas that own rows in groups of two (one axis of two owns them, say) wait for no other group."""
    ((slots,), _) = balanced([(4, 1.0)], 8)
    assert [sum(row is not None for row in slots[i : i + 2]) for i in range(0, 8, 2)] == [1] * 4
