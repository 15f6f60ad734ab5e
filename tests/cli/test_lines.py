"""Questions from lines."""

import io

import pytest

from clover_local.cli.lines import questions, require_unicode, unquote
from clover_local.cli.prompts import LARGEST
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


class Endless(io.BytesIO):
    """Zeros without a line's end, as of /dev/zero; counts the bytes asked for."""

    asked = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None and size > 0, "a line without a limit"
        self.asked += size
        return b"\0" * size


def test_a_line_without_an_end_is_refused() -> None:
    stream = Endless()
    lines = questions(stream)
    with pytest.raises(SettingsError, match="more than 10,000,000 bytes"):
        next(lines)
    assert list(lines) == []
    assert stream.asked == LARGEST + 1


def test_quotes_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clover_local.cli.lines.LARGEST", 100)
    with pytest.raises(SettingsError, match="more than 100 bytes"):
        list(questions(io.BytesIO(b'"""' + b"a line\n" * 20)))


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
