"""What DRY searches: the response in one array, and where each token stands."""

from clover_local.decoding.repetition.history import History


def test_a_response_that_grows_is_followed() -> None:
    history, response = History(), [5, 7]
    history.follow(response)
    response += [5] * 200
    history.follow(response)
    assert history.places(5).tolist() == [0, *range(2, 202)]
    assert history.places(7).tolist() == [1]
    assert history.places(9).tolist() == []
    assert history.known([], start=202).tokens.tolist() == response


def test_what_stands_behind_the_response_counts_for_one_forward() -> None:
    history = History()
    history.follow([5, 7])
    known = history.known([7, 5, 9], start=2)
    assert known.tokens.tolist() == [5, 7, 7, 5, 9]
    assert known.places(5).tolist() == [0, 3]
    assert known.first(3).places(5).tolist() == [0]
    history.follow([5, 7, 8])
    assert history.known([], start=3).tokens.tolist() == [5, 7, 8]
    assert history.places(7).tolist() == [1]


def test_a_block_may_begin_with_the_last_token_of_the_response() -> None:
    history = History()
    history.follow([5, 7, 5])
    known = history.known([5, 9, 5], start=2)
    assert known.tokens.tolist() == [5, 7, 5, 9, 5]
    assert known.places(5).tolist() == [0, 2, 4]
