"""Settings while a chat runs: /set, /show, /mode."""

import difflib
import reprlib
from collections.abc import Iterator

from clover_local.cli import console, effects
from clover_local.cli.preferences import shown
from clover_local.cli.talk import ChatState
from clover_local.cli.thinking import think_word
from clover_local.decoding.keys import KEYS
from clover_local.decoding.settings import Place, is_given, known_key, resolve
from clover_local.errors import SettingsError

RESET = "default"
CHAT_KEYS = ("system", "think", "thinking", "watch", "model", "context", "device", "dtype")
"""What `/show` has besides `KEYS`."""
COMMAND_KEYS = CHAT_KEYS[:5]
"""Of these what a command of the same name changes."""


def set_(chat: ChatState, argument: str) -> None:
    """Changes a setting; with a key alone shows it, with nothing those that were changed."""
    key, value = [*argument.replace("=", " ", 1).split(maxsplit=1), "", ""][:2]
    if not key:
        _show_changed(chat)
        return
    name = _known(key)
    if not value.strip():
        _describe(chat, name)
        return
    if value.strip() == RESET:
        own = resolve(chat.session.opened.config, chat.session.opened.generation, {})
        chat.use(chat.resolved.reset([name], to=own))
    else:
        chat.use(chat.resolved.with_value(name, value))
    console.text(f"{name} = {shown(getattr(chat.resolved.settings, name))}")
    if name == "temperature" and chat.resolved.settings.temperature > 0:
        console.note(f"seed {chat.resolved.settings.seed}")
    for _, why in effects.without_effect([name], chat.resolved.settings):
        console.note(f"note: {name} has no effect {why}")


def mode(chat: ChatState, argument: str) -> None:
    """How an answer is made."""
    if argument:
        set_(chat, f"mode {argument}")
    else:
        console.text(f"mode: {chat.resolved.settings.mode}")


def show(chat: ChatState, argument: str) -> None:
    """Every setting with its value and source; with a key that one, and what it takes."""
    rows = _rows(chat)
    if not argument:
        console.show_table("Settings: value, and where it came from", rows)
        return
    if argument in CHAT_KEYS:
        value, source = next((value, source) for key, value, source in rows if key == argument)
        console.text(f"{argument} = {value} ({source})")
        return
    near = difflib.get_close_matches(argument, [*KEYS, *CHAT_KEYS], n=1, cutoff=0.8)
    if near and near[0] in CHAT_KEYS:
        raise SettingsError(f"unknown setting {argument!r}: did you mean {near[0]}?")
    _describe(chat, _known(argument))


def _known(name: str) -> str:
    """The key that is meant; where none is near, `/show` has them all in a table.

    Raises:
        SettingsError: none.
    """
    if name in COMMAND_KEYS:
        raise SettingsError(f"{name} is no setting of the decoding: /{name} changes it")
    key = name.removeprefix("--").replace("-", "_")
    if not difflib.get_close_matches(key, KEYS, n=1):
        raise SettingsError(f"unknown setting {reprlib.repr(name)}: /show lists the keys")
    return known_key(name)


def _rows(chat: ChatState) -> list[tuple[str, str, str]]:
    session = chat.session
    own = (
        chat.conversation.system or "none",
        think_word(chat),
        chat.thinking,
        chat.watch,
        session.opened.folder,
        session.context,
        session.device,
        session.dtype,
    )
    rows = [(key, shown(value), source) for key, value, source in chat.resolved.rows()]
    places = [chat.sources.get(key, Place.DEFAULT) for key in CHAT_KEYS]
    return [*rows, *zip(CHAT_KEYS, map(str, own), places, strict=True)]


def _show_changed(chat: ChatState) -> None:
    rows = [row for row in _rows(chat) if row[0] in KEYS and is_given(row[2])]
    if rows:
        console.show_table("Changed settings: value, and where it came from", rows)
    else:
        console.text("every setting is the model's own")
    console.text("/set KEY VALUE changes one, such as /set threshold 0.8; /show lists all")


def _describe(chat: ChatState, name: str) -> None:
    value, source = getattr(chat.resolved.settings, name), chat.resolved.sources[name]
    console.text(f"{name} = {shown(value)} ({source})")
    console.text(f"{KEYS[name].help} Takes {KEYS[name].expects}; {RESET} resets it.".strip())
    for _, why in effects.without_effect([name], chat.resolved.settings):
        console.note(f"note: {name} has no effect {why}")


def keys_and_values(typed: str) -> Iterator[str]:
    """What may follow `/set`: a key, and after it its values."""
    key, space, _ = typed.partition(" ")
    if not space:
        yield from KEYS
    elif key in KEYS:
        for value in (*KEYS[key].values, RESET):
            yield f"{key} {value}"


def shown_keys(typed: str) -> Iterator[str]:
    """What may follow `/show`."""
    yield from (*KEYS, *CHAT_KEYS)
