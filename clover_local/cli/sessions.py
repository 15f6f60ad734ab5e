"""Conversations in files, and another model in a chat: /save, /load, /sessions, /model.

A session is one JSON file: messages, the token ids of the state, and the settings that the user
gave. What was computed is not kept: the first question after a load commits the conversation.
"""

import gc
import json
import os
import re
import stat
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from clover_local.chat import Conversation
from clover_local.cli import console, failures, start
from clover_local.cli.preferences import THINKING, WATCH, ThinkingView, Watch
from clover_local.cli.prompts import messages as ask
from clover_local.cli.talk import ChatState, one_of
from clover_local.cli.turns import paths
from clover_local.decoding.settings import Place, ResolvedSettings, is_asked, is_given, resolve
from clover_local.errors import SessionError, SettingsError
from clover_local.files import (
    as_flag,
    as_object,
    as_text,
    as_token_ids,
    require_file,
    user_path,
)
from clover_local.hub import DEMO

VERSION = 1
LONGEST_NAME = 200
"""Bytes of a name: a file's may have 255, and the one that is written first has a longer name."""
_NAME = re.compile(r"\w[\w.-]{0,99}")


def folder() -> Path:
    """Where sessions are: `$XDG_STATE_HOME/clover-local/sessions`."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "clover-local" / "sessions"


def names(typed: str = "") -> list[str]:
    """The saved sessions whose name begins with `typed`."""
    return sorted(path.stem for path in folder().glob("*.json") if path.stem.startswith(typed))


def save(chat: ChatState, argument: str) -> None:
    """Writes the conversation to a file, whole or not at all."""
    path, talk = _path("/save", argument), chat.conversation
    content = {
        "clover_local_session": VERSION,
        "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": chat.opened.name,
        "system": talk.system,
        "thinking": talk.thinking,
        "messages": talk.messages,
        "token_ids": [] if chat.gone else list(talk.generator.state.committed.tokens),
        "settings": _given(chat.resolved),
        "view": {"thinking": chat.thinking, "watch": chat.watch},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        existed = os.path.lexists(path)
        if existed and not stat.S_ISREG(path.lstat().st_mode):
            raise SessionError(
                f"{path} is no regular file, and stays as it is: /save under another name"
            )
        _replace(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SessionError(
            f"{path} cannot be written ({error.strerror}): set XDG_STATE_HOME to another folder"
        ) from None
    console.text(f"saved {path}" + (" (in place of an earlier one)" if existed else ""))


def load(chat: ChatState, argument: str) -> None:
    """Goes on with a saved conversation; what was said since is forgotten."""
    path, talk = _path("/load", argument), chat.conversation
    content = _read(path)
    opened = chat.opened
    source = f"session {argument}"
    try:
        chat.use(resolve(opened.config, opened.generation, content["settings"], source=source))
    except SettingsError as error:
        raise SessionError(f"{path}: {error} (in its settings: mend it there)") from None
    talk.messages = content["messages"]
    talk.system, talk.thinking = content["system"], content["thinking"]
    chat.sources |= dict.fromkeys(("system", "think"), source)
    if content["view"] is not None:
        chat.thinking, chat.watch = content["view"]
        chat.sources |= dict.fromkeys(("thinking", "watch"), source)
    chat.last = None
    console.text(f"{argument}: {len(talk.messages) // 2} turns, saved {content['saved']}")
    if content["model"] != opened.name:
        console.note(f"note: it was held with {content['model']}, this is {opened.name}")


def sessions(chat: ChatState, argument: str) -> None:
    """Lists the saved sessions."""
    rows = []
    for name in names():
        try:
            content = _read(folder() / f"{name}.json")
        except SessionError:
            rows.append((name, "damaged", "", ""))
            continue
        turns = f"{len(content['messages']) // 2} turns"
        rows.append((name, turns, content["saved"], content["model"]))
    if rows:
        console.show_table("Sessions", rows)
    else:
        console.text("no session is saved yet: /save NAME")


def model(chat: ChatState, argument: str) -> None:
    """Says which model answers, or goes on with another one."""
    if argument:
        switch(chat, argument)
    chat.restore()
    session = chat.session
    console.text(f"model: {session.opened.name} ({session.opened.folder})")
    console.text(f"{session.device} in {session.dtype}, context {session.context}")


def switch(chat: ChatState, name: str) -> None:
    """Loads another model in the place of this one; the conversation goes on.

    Raises:
        SettingsError: this chat cannot load one.
        CloverError: the other model cannot be used; the one before is still there, or again, or
            `chat.restore` has it again when it is needed.
    """
    user_path(name)
    if chat.load is None:
        raise SettingsError("/model NAME needs `clover-local chat`: start it with that model")
    import torch

    talk = chat.conversation
    opened, resolved = start.open_model(
        name,
        _given(chat.resolved),
        origins={**chat.sources, **chat.resolved.sources},
        template_flags={"think": talk.thinking} if is_asked(chat.sources.get("think", "")) else {},
        strict=False,
    )
    history = talk.messages or ask("Hello", system=talk.system)
    opened.tokenizer.render(history, enable_thinking=talk.thinking)
    chat.last = None
    chat.unload()  # its memory is what the other one takes
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        session = chat.load(opened, resolved)
    except BaseException:
        _bring_back(chat)
        raise
    conversation = Conversation(
        opened.tokenizer, session.generator, system=talk.system, thinking=talk.thinking
    )
    conversation.messages = talk.messages
    chat.session, chat.conversation, chat.resolved = session, conversation, resolved
    chat.gone = None
    chat.sources["model"] = Place.MODEL


def _bring_back(chat: ChatState) -> None:
    """Loads the model from before, and says so; where that fails too, how it comes back."""
    try:
        chat.restore()
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, KeyboardInterrupt):
            failures.report(error)
        console.note(
            f"note: no model is in memory; your next question loads {chat.opened.name} again, "
            "/model NAME another one, and /save works meanwhile"
        )
    else:
        console.note(f"note: {chat.opened.name} answers again")


def models(typed: str) -> list[str]:
    """Names of models that begin with `typed`, for completion."""
    found = [path for path in paths(typed) if path.endswith(("/", ".gguf"))]
    return [name for name in (DEMO, *found) if name.startswith(typed)]


def _given(resolved: ResolvedSettings) -> dict[str, object]:
    """The settings that are not the model's own."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value, source in resolved.rows()
        if is_given(source)
    }


def _path(command: str, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"{command} takes a name of letters, digits, `.`, `-` and `_`, such as {command} maths"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise SettingsError(
            f"the name has {len(name.encode())} bytes of UTF-8, {command} takes {LONGEST_NAME}: "
            "take a shorter one"
        )
    return folder() / f"{name}.json"


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _read(path: Path) -> dict[str, Any]:
    """The fields of a session.

    Raises:
        SessionError: there is none, or it is damaged.
    """
    try:
        require_file(path)
        content = as_object(json.loads(path.read_text(encoding="utf-8")))
        if content["clover_local_session"] != VERSION:
            raise ValueError(f"of version {content['clover_local_session']!r}")
        system, thinking = content["system"], content["thinking"]
        as_token_ids(content["token_ids"])
        return {
            "saved": _text(content["saved"]),
            "model": _text(content["model"]),
            "system": None if system is None else _text(system),
            "thinking": None if thinking is None else as_flag(thinking),
            "messages": _messages(content["messages"]),
            "settings": as_object(content["settings"]),
            "view": _view(content["view"]) if "view" in content else None,
        }
    except FileNotFoundError:
        known = ", ".join(names()) or "none"
        raise SessionError(f"there is no session {path.stem}: saved are {known}") from None
    except OSError as error:
        raise SessionError(f"{path} cannot be read ({error.strerror}): remove it") from None
    except (ValueError, TypeError, KeyError, RecursionError, SettingsError) as error:
        why = " ".join(str(error).split())
        raise SessionError(f"{path} is no session, or damaged ({why}): remove it") from None


def _view(value: Any) -> tuple[ThinkingView, Watch]:
    """How thinking and the active block appear."""
    view = as_object(value)
    return (
        one_of(THINKING, as_text(view["thinking"]), command="thinking"),
        one_of(WATCH, as_text(view["watch"]), command="watch"),
    )


def _messages(value: Any) -> list[Any]:
    """Questions and answers in turns, as a conversation keeps them."""
    if not isinstance(value, list) or len(value) % 2:
        raise TypeError("messages that are no turns")
    for index, message in enumerate(value):
        role = ("user", "assistant")[index % 2]
        if as_object(message).keys() != {"role", "content"} or message["role"] != role:
            raise ValueError(f"message {index} is none of {role}")
        _text(message["content"])
    return value


def _text(value: Any) -> str:
    """A text that UTF-8 has, as no half of a surrogate pair does."""
    as_text(value).encode()
    return str(value)
