"""Philox4x32-10 against its published vectors, and what a draw's number depends on."""

import pytest

from clover_local.decoding.random import ACCEPT, PICK, philox4x32, uniform

# Random123, kat_vectors: philox4x32 10 rounds.
ONES = 0xFFFFFFFF
VECTORS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_published_vectors_are_reproduced(name: str) -> None:
    counter, key, words = VECTORS[name]
    assert philox4x32(counter, key) == words


def test_uniform_is_the_top_24_bits_of_the_first_word() -> None:
    assert uniform(0, 0, pass_number=0, purpose=PICK) == 0x6627E8 / 2**24


def test_seed_fills_both_key_words() -> None:
    word = philox4x32((7, 3, ACCEPT, 2), (0x89ABCDEF, 0x01234567))[0]
    drawn = uniform(0x0123456789ABCDEF, 7, pass_number=3, purpose=ACCEPT, retry=2)
    assert drawn == (word >> 8) / 2**24


def test_every_part_of_the_counter_changes_the_number() -> None:
    numbers = {
        uniform(5, 1, pass_number=0, purpose=PICK),
        uniform(6, 1, pass_number=0, purpose=PICK),
        uniform(5 + 2**32, 1, pass_number=0, purpose=PICK),
        uniform(5, 2, pass_number=0, purpose=PICK),
        uniform(5, 1, pass_number=1, purpose=PICK),
        uniform(5, 1, pass_number=0, purpose=ACCEPT),
        uniform(5, 1, pass_number=0, purpose=PICK, retry=1),
    }
    assert len(numbers) == 7


def test_numbers_are_spread_evenly_over_zero_to_one() -> None:
    drawn = [uniform(1, n, pass_number=0, purpose=PICK) for n in range(4000)]
    assert all(0 <= number < 1 for number in drawn)
    tenths = [sum(int(number * 10) == tenth for number in drawn) for tenth in range(10)]
    assert all(330 < count < 470 for count in tenths)
