"""Points of one growing sequence share their tokens."""

import tracemalloc

import pytest

from clover_local.prefix import Prefix


def test_what_follows_one_point_does_not_show_in_another() -> None:
    early = Prefix([1, 2])
    late = early.followed_by([3, 4])
    other = early.followed_by([5])
    assert [[*point] for point in (early, late, other)] == [[1, 2], [1, 2, 3, 4], [1, 2, 5]]
    assert late.followed_by([6]) == (1, 2, 3, 4, 6)
    assert other.followed_by([]) == other


def test_a_point_that_goes_on_copies_nothing() -> None:
    tracemalloc.start()
    early = Prefix([1] * 100_000)
    alone, _ = tracemalloc.get_traced_memory()
    late = early.followed_by([3])
    kept = late.first(100_000)
    all_three, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all_three < 1.5 * alone  # a list has some room at its end
    assert kept == early and late.first(200_000) == late


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [((), False), ((1,), False), ((1, 2), True), ((1, 2, 3), True), ((1, 9, 3), False)],
)
def test_starts_those_tokens_that_begin_with_it(tokens: tuple[int, ...], starts: bool) -> None:
    assert Prefix([1, 2]).starts(tokens) == starts
    assert Prefix([1, 2]).starts(Prefix(tokens)) == starts


def test_points_of_one_list_are_told_apart_by_length_alone() -> None:
    early = Prefix([1, 2])
    late = early.followed_by([3])
    assert early.starts(late) and not late.starts(early) and early != late


def test_reads_as_a_tuple_does() -> None:
    prefix = Prefix([1, 2]).followed_by([3, 4, 5]).first(4)
    same = [1, 2, 3, 4]
    assert len(prefix) == 4 and [*prefix] == same and repr(prefix) == "Prefix([1, 2, 3, 4])"
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(3, 1), slice(None, None, -2)):
        assert [*prefix[part]] == same[part]
    assert prefix == Prefix(same) and prefix != Prefix(same[:3])
    assert [prefix[index] for index in (0, 3, -1, -4)] == [1, 4, 4, 1]
    for index in (4, -5):
        with pytest.raises(IndexError):
            prefix[index]
    assert prefix != "1234"
