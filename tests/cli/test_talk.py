"""A running chat: what waits for a question, and a model that is let go and comes back."""

from pathlib import Path

import pytest

from clover_local.cli.commands import execute
from clover_local.cli.talk import ChatState, as_count
from clover_local.decoding.settings import ResolvedSettings
from clover_local.errors import ContextError
from clover_local.session import OpenModel, Session, load


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_text("A note.", encoding="utf-8")
    return path


def test_an_attachment_goes_before_one_question(chat: ChatState, note: Path) -> None:
    execute(f"/read {note}", chat)
    for question in ("who?", "why?"):
        chat.answer(chat.ask(question))
    contents = [message["content"] for message in chat.conversation.messages]
    assert contents[::2] == ["A note.\n\nwho?", "why?"]


def test_a_question_that_fails_leaves_its_attachment_waiting(chat: ChatState, note: Path) -> None:
    execute(f"/read {note}", chat)
    state = chat.conversation.generator.state
    context, state.context = state.context, 32
    with pytest.raises(ContextError):
        chat.answer(chat.ask("word " * 100))
    assert chat.attached == "A note."
    state.context = context
    chat.answer(chat.ask("who?"))
    assert chat.conversation.last_question == "A note.\n\nwho?"
    assert not chat.attached


def test_a_question_stopped_before_its_first_token_leaves_its_attachment_waiting(
    chat: ChatState, note: Path
) -> None:
    execute(f"/read {note}", chat)
    events = chat.ask("who?")
    next(events)
    events.close()
    assert chat.conversation.messages == []
    assert chat.attached == "A note."


def test_a_model_that_was_let_go_is_loaded_for_the_next_question(chat: ChatState) -> None:
    loaded = list[str]()

    def again(opened: OpenModel, resolved: ResolvedSettings) -> Session:
        loaded.append(opened.name)
        return load(opened, resolved.settings, device="cpu")

    chat.load, name = again, chat.opened.name
    chat.unload()
    assert chat.opened.name == name
    chat.answer(chat.ask("hello"))
    assert loaded == [name]
    assert chat.conversation.generator is chat.session.generator
    assert len(chat.conversation.messages) == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("1,000", 1000), ("²", None), ("9" * 5000, None), ("-1", None), ("", None)],
    ids=["plain", "comma", "superscript", "endless", "negative", "empty"],
)
def test_a_count_is_decimal_digits(text: str, number: int | None) -> None:
    assert as_count(text) == number
