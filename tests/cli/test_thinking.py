"""/think, /thinking and the thinking budget."""

from dataclasses import replace

import pytest

from clover_local.chat import Conversation
from clover_local.cli.commands import execute
from clover_local.cli.talk import ChatState
from clover_local.decoding.keys import KEYS
from clover_local.decoding.settings import resolve
from clover_local.errors import SettingsError
from clover_local.session import load, open_model


def say(line: str, chat: ChatState, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, stdout and stderr."""
    execute(line, chat)
    return "".join(capsys.readouterr())


@pytest.fixture(scope="module")
def demo() -> ChatState:
    """A chat with the demo model, whose template can switch thinking."""
    opened = open_model("demo")
    resolved = resolve(opened.config, opened.generation, {"max_new_tokens": 200})
    session = load(opened, resolved.settings, device="cpu")
    return ChatState(session, Conversation(opened.tokenizer, session.generator), resolved)


@pytest.fixture
def thinker(demo: ChatState) -> ChatState:
    """The same without any memory."""
    opened = demo.session.opened
    demo.use(resolve(opened.config, opened.generation, {"max_new_tokens": 200}))
    demo.conversation.new()
    demo.conversation.thinking = None
    return demo


def test_think_says_when_the_template_has_no_switch(
    chat: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say("/think on", chat, capsys)
    assert chat.conversation.thinking is True
    assert "no effect" in said
    say("/think auto", chat, capsys)
    assert chat.conversation.thinking is None


@pytest.mark.parametrize("mode", ["denoise", "ar", "draft"])
def test_a_budget_ends_the_thinking_where_it_says(
    thinker: ChatState, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    execute(f"/mode {mode}", thinker)
    assert "think: on, for 8 tokens at most" in say("/think 8", thinker, capsys)
    thinker.answer(thinker.conversation.ask("What is 17 + 26?"))
    assert thinker.last is not None
    end = thinker.resolved.settings.think_end_token_id
    tokens = [each.token for each in thinker.last.tokens]
    assert end is not None
    assert tokens.index(end) == 8
    assert end not in tokens[9:12]
    answer = thinker.conversation.last_answer
    assert answer.strip()
    assert "think" not in answer


def test_on_off_and_auto_lift_the_budget(
    thinker: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    before = thinker.resolved
    execute("/think 50", thinker)
    assert thinker.resolved.sources["think_end_start"] == "/think"
    capsys.readouterr()
    assert say("/think on", thinker, capsys) == "think: on\n"
    assert thinker.resolved == before
    execute("/set think_end_bias 3", thinker)  # no budget, and so none to lift
    execute("/think off", thinker)
    assert thinker.resolved.settings.think_end_bias == 3


def test_a_budget_sets_what_help_says_and_nothing_else(
    thinker: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/think 50", thinker)
    capsys.readouterr()
    changed = {key for key, _, source in thinker.resolved.rows() if source == "/think"}
    said = say("/help think", thinker, capsys)
    assert changed == {key for key in KEYS if "_" in key and key in said}


def test_a_budget_is_refused_where_no_token_ends_the_thinking(chat: ChatState) -> None:
    settings = replace(chat.resolved.settings, think_end_token_id=None)
    chat.use(replace(chat.resolved, settings=settings))
    before = chat.resolved
    with pytest.raises(SettingsError, match="names none"):
        execute("/think 100", chat)
    assert chat.resolved is before


def test_the_thinking_of_the_last_answer_can_be_read(
    thinker: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    execute("/think on", thinker)
    thinker.answer(thinker.conversation.ask("What is 17 + 26?"))
    capsys.readouterr()
    thought = thinker.conversation.last_thinking
    assert thought
    assert say("/thinking", thinker, capsys) == f"{thought}\n"
    assert say("/thinking fold", thinker, capsys) == "thinking: fold\n"
    assert thinker.thinking == "fold"
    assert "thinking" in say("/show thinking", thinker, capsys)
    execute("/think off", thinker)
    thinker.answer(thinker.conversation.ask("What is 17 + 26?"))
    assert "did not think" in say("/thinking", thinker, capsys)


def test_there_is_no_thinking_before_the_first_answer(chat: ChatState) -> None:
    with pytest.raises(SettingsError, match="no answer yet"):
        execute("/thinking", chat)
