"""Typed access to metadata."""

import numpy as np
import pytest

from clover_local.errors import CheckpointError
from clover_local.gguf.values import Values

VALUES = Values(
    {
        "n": 3,
        "x": 0.5,
        "yes": True,
        "text": "t",
        "texts": ["a"],
        "same": np.array([0, 2, 2], "<i4"),
        "several": np.array([1, 2], "<i4"),
        "flags": np.array([True]),
        "floats": np.array([0.5], "<f8"),
    },
    "m.gguf",
)


def test_values_come_in_their_type_or_by_default() -> None:
    assert VALUES.integer("n") == VALUES.integer("absent", 3) == 3
    assert VALUES.integer("same") == 2
    assert VALUES.number("x") == 0.5
    assert VALUES.number("n") == 3.0
    assert VALUES.flag("yes")
    assert VALUES.text("text") == "t"
    assert VALUES.texts("texts") == ["a"]
    assert VALUES.integers("several") == [1, 2]
    assert VALUES.flags("flags") == [True]
    assert VALUES.floats("floats").tolist() == [0.5]
    assert "n" in VALUES
    assert "absent" not in VALUES


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("integer", "x"),
        ("integer", "yes"),
        ("integer", "several"),
        ("number", "text"),
        ("flag", "n"),
        ("text", "n"),
        ("texts", "text"),
        ("integers", "floats"),
        ("flags", "several"),
        ("floats", "several"),
    ],
)
def test_a_wrong_type_is_an_error_even_with_a_default(kind: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {key} is not"):
        getattr(VALUES, kind)(key)


def test_an_absent_key_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks the key absent"):
        VALUES.integer("absent")
