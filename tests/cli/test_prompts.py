"""Where a prompt comes from."""

import io
import sys
from pathlib import Path

import pytest
import typer

from clover_local.cli.prompts import LARGEST, decode, messages, parse_ids, read_prompt
from clover_local.errors import SettingsError


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from the pipe\n")))


def test_given_text_comes_before_a_pipe(pipe: None) -> None:
    assert read_prompt("given\n", file=None, keep_newline=False) == "given\n"


@pytest.mark.parametrize(("keep", "end"), [(False, ""), (True, "\n")])
def test_the_newline_at_the_end_of_a_pipe(pipe: None, keep: bool, end: str) -> None:
    assert read_prompt(None, file=None, keep_newline=keep) == "from the pipe" + end


def test_a_dash_is_stdin(pipe: None) -> None:
    assert read_prompt(None, file=Path("-"), keep_newline=False) == "from the pipe"


def test_two_sources_are_refused(pipe: None, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter):
        read_prompt("text", file=tmp_path / "file", keep_newline=False)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SettingsError, match="empty"):
        read_prompt(None, file=tmp_path / "empty", keep_newline=False)


def test_a_byte_order_mark_is_dropped() -> None:
    assert decode("\ufeffhé".encode(), "x") == "hé"


def test_broken_utf_8_names_source_and_byte() -> None:
    with pytest.raises(SettingsError, match=r"notes\.txt is not UTF-8 \(byte 2\)"):
        decode(b"ab\xff", "notes.txt")


def test_ids_are_read() -> None:
    assert parse_ids("1, 22,3", flag="--prompt-ids") == (1, 22, 3)


@pytest.mark.parametrize("text", ["", "1,,2", "a", "1 2", "-1"])
def test_what_is_no_list_of_ids_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--prompt-ids"):
        parse_ids(text, flag="--prompt-ids")


def test_a_system_prompt_stands_before_the_question() -> None:
    assert [m["role"] for m in messages("q", system="s")] == ["system", "user"]
    assert messages("q", system=None) == [{"role": "user", "content": "q"}]


def test_a_prompt_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="more than 10,000,000 bytes"):
        read_prompt(None, file=Path("/dev/zero"), keep_newline=False)
    endless = io.TextIOWrapper(io.BytesIO(b"a" * (LARGEST + 1)))
    monkeypatch.setattr(sys, "stdin", endless)
    with pytest.raises(SettingsError, match="stdin has more than"):
        read_prompt(None, file=None, keep_newline=False)
