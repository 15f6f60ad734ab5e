"""What a forward costs, from a few measurements."""

from clover_local.decoding.auto.prices import WINDOW, Price


def price(*milliseconds: float) -> Price:
    made = Price()
    for each in milliseconds:
        made.add(each)
    return made


def test_nothing_is_known_before_the_first_measurement() -> None:
    assert not price().is_known
    assert price().milliseconds == 0.0


def test_a_few_slow_forwards_do_not_move_the_price() -> None:
    assert price(3.0, 3.0, 90.0, 3.0, 3.0).milliseconds == 3.0


def test_a_cold_first_forward_is_forgotten_and_told() -> None:
    made = price(100.0, 4.0)
    assert made.was_cold
    assert made.milliseconds == 4.0
    made.add(1.0)
    assert made.was_cold
    assert made.milliseconds == 2.5


def test_a_warm_first_forward_counts() -> None:
    made = price(5.0, 4.0)
    assert not made.was_cold
    assert made.milliseconds == 4.5


def test_what_is_far_from_the_price_is_news() -> None:
    assert not price(4.0).has_news
    assert not price(4.0, 4.0, 5.9).has_news
    assert price(4.0, 4.0, 6.1).has_news
    assert price(4.0, 4.0, 2.6).has_news


def test_before_a_probe_all_but_the_last_measurement_is_forgotten() -> None:
    made = price(60.0, 60.0, 60.0, 50.0)
    made.forget()
    made.add(4.0)
    assert made.milliseconds == 27.0


def test_old_measurements_are_forgotten() -> None:
    assert price(*[9.0] * WINDOW, *[2.0] * WINDOW).milliseconds == 2.0
