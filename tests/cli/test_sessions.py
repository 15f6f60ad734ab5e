"""Conversations in files, and another model in a chat."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clover_local.cli import sessions
from clover_local.cli.commands import execute
from clover_local.cli.talk import ChatState
from clover_local.decoding.settings import ResolvedSettings
from clover_local.errors import CloverError, SessionError, SettingsError
from clover_local.session import OpenModel, Session, load


@pytest.fixture
def talk(chat: ChatState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatState:
    """A chat of one turn with a setting of its own, and an empty place for sessions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    execute("/set max_new_tokens 5", chat)
    execute("/set suppress 7,8", chat)
    execute("/system Be brief.", chat)
    chat.answer(chat.conversation.ask("hello é"))
    return chat


def test_a_saved_conversation_comes_back_with_its_settings(
    talk: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/thinking fold", talk)
    execute("/watch heat", talk)
    execute("/save maths", talk)
    messages = list(talk.conversation.messages)
    execute("/new", talk)
    execute("/set max_new_tokens 9", talk)
    execute("/set threshold 0.1", talk)
    execute("/system none", talk)
    execute("/thinking show", talk)
    execute("/watch off", talk)
    execute("/load maths", talk)
    assert talk.conversation.messages == messages
    assert talk.conversation.system == "Be brief."
    assert (talk.thinking, talk.watch) == ("fold", "heat")
    settings = talk.conversation.generator.settings
    assert (settings.max_new_tokens, settings.suppress) == (5, (7, 8))
    assert settings.threshold == talk.session.opened.config.threshold
    rows = {key: source for key, _, source in talk.resolved.rows()}
    assert rows["max_new_tokens"] == "session maths"
    assert "maths: 1 turns" in capsys.readouterr().out
    talk.answer(talk.conversation.ask("and now"))
    assert len(talk.conversation.messages) == 4


def test_a_session_holds_text_ids_and_settings_for_its_owner_only(
    talk: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/save one", talk)
    path = tmp_path / "clover-local" / "sessions" / "one.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["token_ids"] == list(talk.conversation.generator.state.committed.tokens)
    assert content["settings"] == {"max_new_tokens": 5, "suppress": [7, 8]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    execute("/save one", talk)
    assert "in place of an earlier one" in capsys.readouterr().out
    assert os.listdir(path.parent) == ["one.json"]


def test_a_save_that_fails_leaves_the_earlier_file_as_it_was(
    talk: ChatState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("/save one", talk)
    path = sessions.folder() / "one.json"
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SessionError, match="No space left"):
        execute("/save one", talk)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["one.json"]


def damaged() -> dict[str, Any]:
    return {
        "cut": lambda text: text[:-30],
        "list": lambda text: "[]",
        "binary": lambda text: "\udcff",
        "version": lambda text: text.replace('session": 1', 'session": 2'),
        "role": lambda text: text.replace('"assistant"', '"tool"'),
        "half a turn": lambda text: text.replace('"messages": [', '"messages": [{},'),
        "key": lambda text: text.replace('"thinking"', '"thinkink"'),
        "view": lambda text: text.replace('"block"', '"telly"'),
        "surrogate": lambda text: text.replace("hello", r"\ud800"),
        "ids": lambda text: text.replace('"token_ids": [', '"token_ids": ["x",'),
    }


@pytest.mark.parametrize("kind", damaged())
def test_a_damaged_session_is_one_line_and_changes_nothing(
    talk: ChatState, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    execute("/save one", talk)
    path = sessions.folder() / "one.json"
    text = damaged()[kind](path.read_text(encoding="utf-8"))
    path.write_bytes(text.encode(errors="surrogateescape"))
    before = list(talk.conversation.messages)
    with pytest.raises(SessionError, match="is no session, or damaged") as caught:
        execute("/load one", talk)
    assert "\n" not in str(caught.value)
    assert talk.conversation.messages == before
    capsys.readouterr()
    execute("/sessions", talk)
    assert "one  damaged" in capsys.readouterr().out


@pytest.mark.parametrize("value", ['"x"', "[]", "{}", "true", "-1", "1e999"])
def test_a_setting_that_is_none_names_the_file_and_changes_nothing(
    talk: ChatState, value: str
) -> None:
    execute("/set threshold 0.5", talk)
    execute("/save one", talk)
    path = sessions.folder() / "one.json"
    text = path.read_text(encoding="utf-8")
    assert '"threshold": 0.5' in text
    path.write_text(text.replace('"threshold": 0.5', f'"threshold": {value}'), encoding="utf-8")
    before = talk.resolved
    with pytest.raises(SessionError, match=rf"{path}: threshold is .*mend it there"):
        execute("/load one", talk)
    assert talk.resolved is before


def test_a_name_is_as_long_as_a_file_name_may_be(talk: ChatState) -> None:
    execute(f"/save {'漢' * 66}", talk)
    with pytest.raises(SettingsError, match="300 bytes of UTF-8, /save takes 200"):
        execute(f"/save {'漢' * 100}", talk)


@pytest.mark.skipif(os.name != "posix", reason="needs links and named pipes")
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_what_is_no_regular_file_is_not_replaced(
    talk: ChatState, tmp_path: Path, kind: str
) -> None:
    execute("/save other", talk)
    path = sessions.folder() / "one.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("other.json" if kind == "link" else "absent.json")
    before = path.lstat()
    with pytest.raises(SessionError, match="no regular file"):
        execute("/save one", talk)
    assert path.lstat() == before
    assert sorted(os.listdir(path.parent)) == ["one.json", "other.json"]


def test_a_session_without_a_view_leaves_it_as_it_is(talk: ChatState) -> None:
    execute("/save one", talk)
    path = sessions.folder() / "one.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["view"]
    path.write_text(json.dumps(content), encoding="utf-8")
    execute("/watch heat", talk)
    execute("/load one", talk)
    assert talk.watch == "heat"


def test_sessions_are_listed_completed_and_named_when_one_is_missing(
    talk: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/sessions", talk)
    assert "no session is saved yet" in capsys.readouterr().out
    execute("/save maths", talk)
    execute("/save more", talk)
    execute("/sessions", talk)
    assert "more   1 turns" in capsys.readouterr().out
    assert sessions.names("ma") == ["maths"]
    with pytest.raises(SessionError, match="saved are maths, more"):
        execute("/load mathematics", talk)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a" * 101])
def test_a_name_that_is_no_file_name_is_refused(talk: ChatState, name: str) -> None:
    for command in ("/save", "/load"):
        with pytest.raises(SettingsError, match="takes a name"):
            execute(f"{command} {name}", talk)


def test_model_says_which_and_where(talk: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    execute("/model", talk)
    said = capsys.readouterr().out
    assert str(talk.session.opened.folder) in said
    assert "cpu in float32" in said
    with pytest.raises(SettingsError, match="clover-local chat"):
        execute("/model demo", talk)


def reload(opened: OpenModel, resolved: ResolvedSettings) -> Session:
    return load(opened, resolved.settings, device="cpu")


def test_another_model_goes_on_with_the_conversation(talk: ChatState, model_folder: Path) -> None:
    before = talk.session
    talk.load = reload
    execute(f"/model {model_folder}", talk)
    assert talk.session is not before
    assert talk.session.opened.folder == model_folder
    assert talk.conversation.generator is talk.session.generator
    assert talk.conversation.generator.settings.max_new_tokens == 5
    assert talk.sources["model"] == "/model"
    talk.answer(talk.conversation.ask("and now"))
    assert len(talk.conversation.messages) == 4


@pytest.mark.parametrize(
    ("lines", "notes"),
    [
        (["/think 8"], ["think has no effect with this model"]),
        (["/think 8", "/think auto"], []),
        (
            ["/think 8", "/set think_end_bias 0", "/think auto"],
            [f"think_end_{part} has no effect while" for part in ("start", "window")],
        ),
        (["/set top_k 5"], ["top_k has no effect at temperature 0"]),
    ],
    ids=lambda value: "; ".join(value).replace("/", ""),
)
def test_what_another_model_does_not_obey_is_noted_by_the_name_that_was_typed(
    talk: ChatState,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    notes: list[str],
) -> None:
    talk.load = reload
    for line in lines:
        execute(line, talk)
    capsys.readouterr()
    execute(f"/model {model_folder}", talk)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(notes)
    for line, note in zip(said, notes, strict=True):
        assert line.startswith(f"note: {note}")


def test_where_another_model_fails_the_one_before_answers(
    talk: ChatState, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.load = reload
    with pytest.raises(CloverError, match="no folder"):
        execute("/model ./absent", talk)

    def failing(opened: OpenModel, resolved: ResolvedSettings) -> Session:
        if opened.folder == model_folder:
            raise SettingsError("it does not fit")
        return reload(opened, resolved)

    talk.load = failing
    with pytest.raises(SettingsError, match="does not fit"):
        execute(f"/model {model_folder}", talk)
    assert talk.session.opened.folder != model_folder
    assert f"{talk.opened.name} answers again" in capsys.readouterr().err
    talk.answer(talk.conversation.ask("still there"))
    assert talk.last is not None and replace(talk.last).tokens


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_where_the_one_before_cannot_come_back_either_the_conversation_is_whole(
    talk: ChatState,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
) -> None:
    def stopped(opened: OpenModel, resolved: ResolvedSettings) -> Session:
        raise error

    talk.load, messages, name = stopped, [*talk.conversation.messages], talk.opened.name
    for _ in range(2):
        with pytest.raises(error):
            execute(f"/model {model_folder}", talk)
        assert "your next question loads" in capsys.readouterr().err
    execute("/help", talk)
    execute("/save kept", talk)
    with pytest.raises(error):
        execute("/stats", talk)
    talk.load = reload
    execute("/load kept", talk)
    assert talk.conversation.messages == messages
    assert talk.session.opened.name == name
    talk.answer(talk.ask("and now"))
    assert len(talk.conversation.messages) == len(messages) + 2


def test_another_model_may_come_where_none_is_in_memory(
    talk: ChatState, model_folder: Path
) -> None:
    talk.unload()
    talk.load = reload
    execute(f"/model {model_folder}", talk)
    assert talk.session.opened.folder == model_folder
    assert talk.gone is None
    talk.answer(talk.ask("and now"))
    assert len(talk.conversation.messages) == 4


def test_a_path_of_a_model_that_is_none_is_one_sentence(talk: ChatState) -> None:
    talk.load = reload
    with pytest.raises(SettingsError, match="NUL"):
        execute("/model ~a\0/", talk)
    with pytest.raises(CloverError, match="no home folder"):
        execute("/model ~no-such-user/x", talk)
    assert talk.gone is None


def test_demo_folders_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").touch()
    (tmp_path / "notes.txt").touch()
    assert sessions.models("de") == ["demo"]
    assert sessions.models(f"{tmp_path}/") == [f"{tmp_path}/model/", f"{tmp_path}/model.gguf"]
