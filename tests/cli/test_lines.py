"""Questions from lines."""

import io

import pytest

from clover_local.cli.lines import questions, require_unicode, unquote
from clover_local.errors import SettingsError


def test_every_line_is_a_question() -> None:
    assert list(questions(io.BytesIO(b"one\ntwo\r\n\nthree"))) == ["one", "two", "", "three"]


def test_triple_quotes_hold_several_lines() -> None:
    pipe = io.BytesIO(b'before\n"""\nfirst\n\n  second\n"""\nafter\n')
    assert list(questions(pipe)) == ["before", "first\n\n  second", "after"]


def test_quotes_that_are_open_at_the_end_are_closed_there() -> None:
    assert list(questions(io.BytesIO(b'"""a\nb\n'))) == ["a\nb"]


def test_a_line_that_is_no_utf_8_is_named() -> None:
    fine, broken, after = questions(io.BytesIO(b"fine\n\xc3\xa9 \xff\xfe\nafter\n"))
    assert (fine, after) == ("fine", "after")
    require_unicode(fine, "stdin")
    with pytest.raises(SettingsError, match=r"stdin is not UTF-8 \(byte 3\)"):
        require_unicode(broken, "stdin")


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("plain", "plain"),
        ('"""', None),
        ('"""a', None),
        ('"""a"""', "a"),
        (' """a\nb"""\n', "a\nb"),
        ('""""""', ""),
        ('say """x"""', 'say """x"""'),
    ],
)
def test_unquote(text: str, question: str | None) -> None:
    assert unquote(text) == question
