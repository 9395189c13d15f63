"""The faults that `make mutations` puts into the code still fit the code: a record that rots would test nothing."""

import pytest
from mutations import MUTATIONS, Broken, Mutation, selection, where


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_text_to_break_and_the_tests_to_notice_it_are_there(mutation):
    assert where(mutation).suffix == ".py"
    assert selection(mutation.tests, mutation.name)
    assert mutation.new != mutation.old


def test_a_text_that_moved_is_no_fault_that_was_caught():
    with pytest.raises(Broken, match="stands 0 times"):
        where(Mutation("gone", "core", "a text that stands nowhere in this package", "", "core"))
    with pytest.raises(Broken, match="there is no"):
        selection("core/test_no_such_file.py", "gone")
