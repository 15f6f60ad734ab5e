"""How much a model thinks, and how much of it is seen: /think, /thinking."""

import reprlib

from clover_local.cli import console
from clover_local.cli.budget import budget, limit, require_end
from clover_local.cli.preferences import THINKING
from clover_local.cli.talk import ChatState, as_count, one_of
from clover_local.decoding.settings import Place, resolve
from clover_local.errors import SettingsError

THINK = {"on": True, "off": False, "auto": None}


def think(chat: ChatState, argument: str) -> None:
    """Whether to think before answering; a number: yes, and for that many tokens at most."""
    if argument:
        _change(chat, argument)
        chat.sources["think"] = Place.THINK
        if not chat.conversation.tokenizer.can_think:
            console.note("note: /think has no effect: the chat template has no switch for it")
    console.text(f"think: {think_word(chat)}")


def _change(chat: ChatState, argument: str) -> None:
    tokens = as_count(argument)
    if tokens is None:
        if argument not in THINK:
            raise SettingsError(
                f"/think takes {', '.join(THINK)}, or a number of tokens, "
                f"not {reprlib.repr(argument)}"
            )
        _lift(chat)
        chat.conversation.thinking = THINK[argument]
        return
    if tokens == 0:
        raise SettingsError("/think 0 leaves no token to think with: /think off does not think")
    require_end(chat.resolved.settings.think_end_token_id, f"/think {argument}")
    chat.use(chat.resolved.with_values(budget(tokens), source=Place.THINK))
    chat.conversation.thinking = True


def _lift(chat: ChatState) -> None:
    """Takes a budget back: what came with it has the model's own values again."""
    if limit(chat.resolved.settings) is None:
        return
    sources, opened = chat.resolved.sources, chat.session.opened
    keys = [key for key in budget(1) if sources[key] == sources["think_end_start"]]
    chat.use(chat.resolved.reset(keys, to=resolve(opened.config, opened.generation, {})))


def think_word(chat: ChatState) -> str:
    """Whether the next answer thinks, as `/think` would take it, and its budget."""
    thinking = chat.conversation.thinking
    most = limit(chat.resolved.settings)
    word = next(word for word, value in THINK.items() if value is thinking)
    return word if most is None or thinking is False else f"{word}, for {most} tokens at most"


def thinking(chat: ChatState, argument: str) -> None:
    """Shows what the last answer thought, or sets how thinking appears from now on."""
    if argument:
        chat.thinking = one_of(THINKING, argument, command="/thinking")
        chat.sources["thinking"] = Place.THINKING
        console.text(f"thinking: {chat.thinking}")
        return
    thought = chat.conversation.last_thinking
    if thought:
        console.text(thought, dim=True)
    else:
        console.text("the last answer did not think (/think on)")
