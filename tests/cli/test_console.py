"""The output sink: what goes where, and what a terminal gets."""

import io
import json
import os
import sys
from collections.abc import Callable

import pytest

from clover_local.cli import console


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes stdout and stderr one terminal with colours, from the call on."""

    def become() -> Terminal:
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    return become


def test_results_go_to_stdout_and_the_rest_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.text("result")
    console.note("note")
    console.aside("aside")
    console.error("wrong")
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert err == "note\nasideerror: wrong\n"


def test_quiet_drops_notes_and_keeps_results_and_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.set_quiet(True)
    try:
        console.text("result")
        console.note("note")
        console.aside("aside")
        console.error("wrong")
        with console.progress("loading") as report:
            report(1, 2)
    finally:
        console.set_quiet(False)
    assert capsys.readouterr() == ("result\n", "error: wrong\n")


def test_an_error_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    console.error("first\n  second\x1b[31m")
    assert capsys.readouterr().err == "error: first second[31m\n"


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"text": "é\n→", "none": None})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "é\n→", "none": None}


def test_json_survives_a_stdout_that_has_ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.print_json({"text": "é"})
    assert json.loads(raw.getvalue()) == {"text": "é"}


def test_a_pipe_gets_text_as_it_is_and_a_terminal_without_controls(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[], Terminal]
) -> None:
    console.text("a\x1b[2Jb\tc", end="")
    assert capsys.readouterr().out == "a\x1b[2Jb\tc"
    screen = terminal()
    console.text("a\x1b[2Jb\tc", end="")
    assert screen.getvalue() == "a[2Jb\tc"


def test_a_table_in_a_pipe_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_table("Sizes", [("a", 1), ("longer", "x y")])
    assert capsys.readouterr().out == "Sizes\n  a       1\n  longer  x y\n"


def test_a_table_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_table("Nothing", [])
    assert capsys.readouterr().out == "Nothing\n"


def test_a_table_on_a_terminal_fits_its_width(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    console.show_table("Sizes", [("key", "word " * 20), ("[bold]", "markup is text")])
    plain = console.printable(screen.getvalue())
    assert "markup is text" in plain
    assert "[bold]" in plain
    assert screen.getvalue().count("word") == 20
    assert screen.getvalue().count("\n") > 4


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_switched_off(
    terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    screen = terminal()
    console.text("x", dim=True)
    assert "\x1b[2m" in screen.getvalue()
    screen.truncate(0)
    monkeypatch.setenv(name, value)
    console.text("x", dim=True)
    assert "\x1b" not in screen.getvalue()


def test_progress_shows_the_share_and_leaves_no_trace(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    with console.progress("loading") as report:
        report(1, 4)
    assert "loading" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_progress_in_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("loading") as report:
        for done in range(5):
            report(done, 5)
    assert capsys.readouterr().err == "loading ...\n"


def test_a_closed_stdout_ends_the_program_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(console, "abandon", lambda stream: None)
    with pytest.raises(SystemExit) as left:
        console.text("x")
    assert left.value.code == console.OUTPUT_CLOSED == 141


def test_a_very_long_error_keeps_its_start_and_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.error("bad " + "x" * 100_000 + ": do this")
    shown = capsys.readouterr().err
    assert len(shown) < 2100
    assert shown.startswith("error: bad x")
    assert shown.endswith("x: do this\n")


def test_a_progress_line_makes_room_for_a_note_and_names_another_work(
    terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PROGRESS_INTERVAL", 0)
    stream = terminal()
    with console.progress("fetching") as line:
        line(1, 4)
        line.note("waiting")
        line(1, 2, label="checking a")
        line(2, 4)
    clear, shown = "\r\x1b[K", stream.getvalue()
    assert f"{clear}\x1b[2mwaiting\x1b[0m\n{clear}checking a 50 %{clear}fetching 50 %" in shown
    assert shown.endswith(clear)


class Pipe(io.TextIOWrapper):
    """A stream whose descriptor is that of a pipe, and whose own writing is a mistake."""

    def write(self, text: str) -> int:
        raise AssertionError(text)


@pytest.mark.skipif(os.name != "posix", reason="writes past the stream on POSIX only")
def test_unbuffered_text_is_written_past_the_stream_whole_and_with_its_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end, begin = os.pipe()
    stream = Pipe(io.FileIO(begin, "w"), encoding="latin-1", errors="replace")
    monkeypatch.setattr(sys, "stdout", stream)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda where, data: whole(where, bytes(data)[:3]))
    console.write_unbuffered("é░ and more\n")
    stream.close()
    with open(end, "rb") as reader:
        assert reader.read() == b"\xe9? and more\n"


def test_unbuffered_text_goes_to_a_stream_without_a_descriptor_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console.write_unbuffered("hello")
    assert stream.getvalue() == "hello"


@pytest.mark.skipif(os.name != "posix", reason="needs SIGPIPE")
def test_unbuffered_text_that_nobody_reads_ends_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end, begin = os.pipe()
    os.close(end)
    with open(begin, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as caught:
            console.write_unbuffered("hello")
        assert caught.value.code == console.OUTPUT_CLOSED
