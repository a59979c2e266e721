"""A sample of `python -m benchmarks.mismatches`: pairs of different operations between two hosts of two ranks."""

from benchmarks import mismatches


def test_of_any_two_operations_the_odd_one_is_named_everywhere_and_the_group_goes_on():
    pairs = mismatches.pairs(40, seed=5)
    assert mismatches.matrix([0, 0, 1, 1], pairs, [10], 60.0) == []


def test_a_wrong_answer_would_be_seen():
    same = [("all_reduce", "all_reduce")]
    found = mismatches.matrix([0, 0], same, [10], 60.0)
    assert [line.rpartition(": ")[2] for line in found] == ["no error"] * 4  # two ranks, either way round
