"""Commands on the last turn, on the golden model."""

import base64
import sys
import tempfile
from pathlib import Path

import pytest

from clover_local.cli.commands import execute
from clover_local.cli.talk import ChatState
from clover_local.cli.turns import paths
from clover_local.errors import SettingsError

SYSTEM = "A system prompt that is long enough to be worth a checkpoint of its own."


@pytest.fixture
def talk(chat: ChatState) -> ChatState:
    """A chat of two turns."""
    chat.conversation.system = SYSTEM
    execute("/set max_new_tokens 33", chat)
    for question in ("the first question", "the second question"):
        chat.answer(chat.conversation.ask(question))
    return chat


def contents(chat: ChatState) -> list[str]:
    return [str(message["content"]) for message in chat.conversation.messages]


def committed(chat: ChatState, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all commits of a prompt from now on."""
    generator, lengths = chat.conversation.generator, list[int]()
    commit = generator.model.commit

    def counted(tokens, state, **options):  # type: ignore[no-untyped-def]
        if options.get("kind") == "prompt":
            lengths.append(len(tokens))
        return commit(tokens, state, **options)

    monkeypatch.setattr(generator.model, "commit", counted)
    return lengths


def editor(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "editor"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(path))


@pytest.mark.parametrize("mode", ["denoise", "ar", "draft"])
def test_regen_starts_from_the_state_before_the_answer(
    talk: ChatState, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    execute(f"/mode {mode}", talk)
    chat, before = talk, contents(talk)
    lengths = committed(chat, monkeypatch)
    execute("/regen", chat)
    first, again = sum(lengths), contents(chat)
    lengths.clear()
    execute("/regen", chat)
    # `denoise` needs no token at all; elsewhere a few, for their logits.
    question = len(chat.conversation.tokenizer.encode("the second question")) + 40
    assert max(first, sum(lengths)) <= (0 if mode == "denoise" else question)
    assert contents(chat)[:3] == before[:3]
    assert contents(chat) == again
    if mode == "denoise":
        assert again == before


def test_regen_draws_with_the_next_seed(
    talk: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/regen", talk)
    assert "at temperature 0" in capsys.readouterr().err
    execute("/set temperature 1.5", talk)
    execute("/regen", talk)
    one = contents(talk)[-1]
    assert "seed 1" in capsys.readouterr().err
    execute("/regen", talk)
    assert talk.resolved.settings.seed == 2
    assert contents(talk)[-1] != one


def test_undo_goes_back_a_turn_and_the_state_with_it(
    talk: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/undo", talk)
    assert "taken back: the second question" in capsys.readouterr().out
    assert len(contents(talk)) == 2
    lengths = committed(talk, monkeypatch)
    talk.answer(talk.conversation.ask("another"))
    # The new question and what surrounds it, and nothing of what was before it.
    assert sum(lengths) <= len(talk.conversation.tokenizer.encode("another")) + 20
    execute("/undo", talk)
    execute("/undo", talk)
    lengths.clear()
    talk.answer(talk.conversation.ask("another"))
    assert sum(lengths) <= len(talk.conversation.tokenizer.encode("another")) + 20
    execute("/undo", talk)
    with pytest.raises(SettingsError, match="no question left to take back"):
        execute("/undo", talk)


def test_edit_asks_the_changed_question_from_the_state_before_it(
    talk: ChatState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    editor(tmp_path, monkeypatch, "sed -i s/second/third/ $1")
    lengths = committed(talk, monkeypatch)
    before = contents(talk)
    execute("/edit", talk)
    assert contents(talk)[:3] == [*before[:2], "the third question"]
    assert sum(lengths) <= len(talk.conversation.tokenizer.encode("the third question")) + 20
    # The same as a fresh conversation would have said.
    talk.conversation.messages = talk.conversation.messages[:2]
    talk.conversation.generator.state.reset()
    edited = contents(talk)
    talk.answer(talk.conversation.ask("the third question"))
    assert contents(talk)[:2] == edited


@pytest.mark.parametrize("script", ["exit 0", "echo > $1"], ids=["unchanged", "emptied"])
def test_an_edit_that_changes_nothing_asks_nothing(
    talk: ChatState,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: str,
) -> None:
    editor(tmp_path, monkeypatch, script)
    before = contents(talk)
    execute("/edit", talk)
    assert contents(talk) == before
    assert "nothing was asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words"), [("exit 3", "code 3"), (r"printf '\377' > $1", "not UTF-8")]
)
def test_an_editor_that_fails_is_one_line(
    talk: ChatState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    editor(tmp_path, monkeypatch, script)
    before = contents(talk)
    with pytest.raises(SettingsError, match=words):
        execute("/edit", talk)
    monkeypatch.setenv("EDITOR", "/no/such/editor")
    with pytest.raises(SettingsError, match="set EDITOR"):
        execute("/edit", talk)
    assert contents(talk) == before


def test_read_attaches_a_file_and_takes_it_off_again(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a text.txt"
    path.write_text("Once upon a time.\n", encoding="utf-8")
    execute(f"/read {path}", chat)
    assert "17 characters" in capsys.readouterr().out
    assert chat.attached == "Once upon a time."
    execute("/read none", chat)
    assert not chat.attached


def test_what_cannot_be_read_is_said(chat: ChatState, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "empty").write_bytes(b"\n")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10_000_001)
    cases = {"absent": "cannot be read", ".": "cannot be read", "binary": "not UTF-8"}
    for name, words in {**cases, "empty": "is empty", "large": "at most"}.items():
        with pytest.raises(SettingsError, match=words):
            execute(f"/read {tmp_path / name}", chat)
    for path, words in (("~no-such-user/x", "no home folder"), ("a\0b", "has a NUL in it")):
        with pytest.raises(SettingsError, match=words):
            execute(f"/read {path}", chat)
    assert not chat.attached


def test_an_edited_question_that_is_no_text_is_kept(
    talk: ChatState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    editor(tmp_path, monkeypatch, r"printf 'long work\377' > $1")
    with pytest.raises(SettingsError, match=r"not UTF-8 .*kept in") as caught:
        execute("/edit", talk)
    (kept,) = tmp_path.glob("clover-local-*")
    assert str(kept) in str(caught.value)
    assert kept.read_bytes() == b"long work\xff"


def test_copy_sends_the_answer_to_the_terminal(
    talk: ChatState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match="needs a terminal"):
        execute("/copy", talk)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    execute("/copy", talk)
    sequence = capsys.readouterr().out.split("\x07")[0]
    assert sequence.startswith("\x1b]52;c;")
    copied = base64.b64decode(sequence.removeprefix("\x1b]52;c;"))
    assert copied == talk.conversation.last_answer.encode()


def test_files_and_folders_are_completed(tmp_path: Path) -> None:
    for name in ("one.txt", ".hidden", "other"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert list(paths(f"{tmp_path}/o")) == [f"{tmp_path}/one.txt", f"{tmp_path}/other"]
    assert list(paths(f"{tmp_path}/f")) == [f"{tmp_path}/folder/"]
    assert f"{tmp_path}/.hidden" not in list(paths(f"{tmp_path}/"))
    assert list(paths(f"{tmp_path}/absent/x")) == []
    assert list(paths("~no-such-user/x")) == []
    assert list(paths("a\0b/x")) == []
