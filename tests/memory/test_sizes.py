"""Sizes and rates as text, there and back."""

import pytest

from clover_local.errors import SettingsError
from clover_local.memory.sizes import (
    GIB,
    MIB,
    parse_bytes,
    parse_capacity,
    parse_rate,
    parse_size,
    shown,
    shown_mib,
    shown_rate,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15360MiB", 15360 * MIB),
        ("16GB", 16 * 10**9),
        ("16 gib", 16 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 800MB ", 800 * 10**6),
        ("1TB", 10**12),
        ("0GB", 0),
        ("2G", 2 * 10**9),
        ("64kB", 64_000),
    ],
)
def test_a_size_is_decimal_unless_it_has_an_i(text: str, expected: int) -> None:
    assert parse_size(text, "--gpu-memory") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("838860800", 800 * MIB),
        (" 64 B ", 64),
        ("0", 0),
        ("800MiB", 800 * MIB),
        ("16GB", 16 * 10**9),
    ],
)
def test_a_number_of_bytes_needs_no_unit(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize("text", ["", "-5", "1.5", "1e9", "GB", "9" * 21])
def test_what_is_no_number_of_bytes_is_one_sentence(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--memory .* is no size: use a number .* such as"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize("text", ["16GB", "16GiB", "16384MiB", "16384MB"])
def test_a_capacity_is_binary_as_makers_count(text: str) -> None:
    assert parse_capacity(text, "--gpu") == 16 * GIB


def test_a_rate_is_bytes_a_second() -> None:
    assert parse_rate("52GB/s", "--link") == 52e9
    assert parse_rate("900 MiB / s", "--link") == 900 * MIB


@pytest.mark.parametrize(
    "text",
    [
        "",
        "16",
        "GB",
        "-1GB",
        "1e3GB",
        "nanGB",
        "1.GB",
        "16GB/s",
        "12 Gi B",
        "5i",
        "9" * 400 + "TiB",
    ],
)
def test_what_is_no_size_is_one_sentence_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--gpu .* is no size: use a number .* such as 16GB"):
        parse_size(text, "--gpu")
    with pytest.raises(SettingsError, match="is no size"):
        parse_capacity(text, "--gpu")


@pytest.mark.parametrize("text", ["", "52", "52GB", "52GB/", "52GB/m", "/s", "fast"])
def test_what_is_no_rate_is_one_sentence_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--link .* is no rate: use .* such as 52GB/s"):
        parse_rate(text, "--link")


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_600, "1.00 MB"),
        (1_622_016, "1.62 MB"),
        (524_451_840, "524 MB"),
        (12_872_318_976, "12.87 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_are_shown_in_decimal_units(nbytes: int, expected: str) -> None:
    assert shown(nbytes) == expected


def test_flags_take_whole_mib_rounded_up() -> None:
    assert shown_mib(GIB) == "1024MiB"
    assert shown_mib(GIB + 1) == "1025MiB"


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (52e9, "52 GB/s"),
        (896e9, "896 GB/s"),
        (1e6, "1 MB/s"),
        (1.5e9, "1.5 GB/s"),
        (3e12, "3 TB/s"),
    ],
)
def test_a_rate_is_shown_in_the_unit_that_suits_it(rate: float, text: str) -> None:
    assert shown_rate(rate) == text
