"""The slash commands of `clover-local chat`, and what they act on."""

import difflib
from dataclasses import asdict

from clover_local.cli import console, effects, sessions, turns
from clover_local.cli.preferences import WATCH, shown
from clover_local.cli.status import offload_rows, size, stats_rows
from clover_local.cli.talk import ChatState, Command, choice
from clover_local.decoding.keys import KEYS, MODES
from clover_local.decoding.settings import DEFAULT, known_key
from clover_local.errors import SettingsError

THINK = {"on": True, "off": False, "auto": None}


def execute(line: str, chat: ChatState) -> None:
    """Runs the command in `line`.

    Raises:
        SettingsError: an unknown command (names the nearest) or a wrong argument.
        EOFError: the command was `/exit`.
    """
    name, argument = [*line.split(maxsplit=1), ""][:2]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else "/help lists all"
        raise SettingsError(
            f"unknown command {name}: {remedy} (a leading space sends it as a question)"
        )
    command.run(chat, argument.strip())


def _help(chat: ChatState, argument: str) -> None:
    console.show_table("Commands", [(command.usage, command.help) for command in COMMANDS.values()])
    console.text(
        'Alt-Enter or """ makes a question of several lines; Ctrl-R searches earlier ones;'
    )
    console.text("Ctrl-C stops an answer, and what was written of it stays in the conversation.")


def _new(chat: ChatState, argument: str) -> None:
    chat.conversation.new()
    chat.attached = ""
    console.note("a new conversation")


def _system(chat: ChatState, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "none" else argument
        chat.sources["system"] = "/system"
    console.text(f"system: {chat.conversation.system or 'none'}")


def _set(chat: ChatState, argument: str) -> None:
    key, value = [*argument.replace("=", " ", 1).split(maxsplit=1), "", ""][:2]
    if not value.strip():
        raise SettingsError(
            "/set takes a key and a value, such as /set threshold 0.8; /show lists the keys"
        )
    chat.resolved = chat.resolved.with_value(key, value)
    chat.conversation.generator.settings = chat.resolved.settings
    name = known_key(key)
    console.text(f"{name} = {shown(getattr(chat.resolved.settings, name))}")
    if name == "temperature" and chat.resolved.settings.temperature > 0:
        console.note(f"seed {chat.resolved.settings.seed}")
    for _, why in effects.without_effect([name], chat.resolved.settings):
        console.note(f"note: {name} has no effect {why}")


def _show(chat: ChatState, argument: str) -> None:
    session = chat.session
    own = {
        "system": chat.conversation.system or "none",
        "think": _word(chat.conversation.thinking),
        "watch": chat.watch,
        "model": session.opened.folder,
        "context": session.context,
        "device": session.device,
        "dtype": session.dtype,
    }
    rows = [(key, shown(value), source) for key, value, source in chat.resolved.rows()]
    rows += [(key, str(value), chat.sources.get(key, DEFAULT)) for key, value in own.items()]
    console.show_table("Settings: value, and where it came from", rows)


def _stats(chat: ChatState, argument: str) -> None:
    if chat.last is not None:
        console.show_table("Last answer", stats_rows(chat.last))
    state = chat.conversation.generator.state
    rows = [("tokens", f"{state.length} of {state.context}")]
    rows += [(part, size(nbytes)) for part, nbytes in asdict(state.nbytes).items()]
    console.show_table("State", rows)


def _cache(chat: ChatState, argument: str) -> None:
    experts = chat.session.model.experts
    stats = experts.stats()
    if stats is None:
        if argument:
            raise SettingsError(
                "/cache N changes the slots of a cache, and here every expert is on the device: "
                "start with --expert-slots N"
            )
        console.text("every expert is on the device: there is no cache")
        return
    if argument:
        if not argument.replace(",", "").isdigit():
            raise SettingsError(f"/cache takes a number of slots, not {argument!r}")
        experts.resize(int(argument.replace(",", "")))
        stats = experts.stats()
    if stats is not None:
        console.show_table("Experts on the device", offload_rows(stats))


def _think(chat: ChatState, argument: str) -> None:
    if argument:
        chat.conversation.thinking = THINK[choice("/think", argument, tuple(THINK))]
        chat.sources["think"] = "/think"
        if not chat.conversation.tokenizer.can_think:
            console.note("note: /think has no effect: the chat template has no switch for it")
    console.text(f"think: {_word(chat.conversation.thinking)}")


def _mode(chat: ChatState, argument: str) -> None:
    if argument:
        _set(chat, f"mode {argument}")
    else:
        console.text(f"mode: {chat.resolved.settings.mode}")


def _watch(chat: ChatState, argument: str) -> None:
    if argument:
        chat.watch = choice("/watch", argument, WATCH)
        chat.sources["watch"] = "/watch"
    console.text(f"watch: {chat.watch}")


def _exit(chat: ChatState, argument: str) -> None:
    raise EOFError


def _word(thinking: bool | None) -> str:
    return next(word for word, value in THINK.items() if value is thinking)


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/new": Command("/new", "forget the conversation; the system prompt stays", _new),
    "/regen": Command("/regen", "answer the last question again", turns.regen),
    "/undo": Command("/undo", "take the last question and its answer back", turns.undo),
    "/edit": Command("/edit", "change the last question in $EDITOR, and ask it", turns.edit),
    "/read": Command(
        "/read FILE",
        "a text before the next question; `none`: no",
        turns.read,
        turns.paths,
    ),
    "/copy": Command("/copy", "the last answer to the clipboard (OSC 52)", turns.copy),
    "/save": Command(
        "/save NAME", "keep the conversation in a file", sessions.save, sessions.names
    ),
    "/load": Command("/load NAME", "go on with a saved one", sessions.load, sessions.names),
    "/sessions": Command("/sessions", "the saved conversations", sessions.sessions),
    "/model": Command(
        "/model [NAME]", "the model; with NAME: go on with another", sessions.model, sessions.models
    ),
    "/system": Command(
        "/system TEXT", "set the system prompt; `none` removes it", _system, ("none",)
    ),
    "/set": Command("/set KEY VALUE", "change a setting", _set, tuple(KEYS)),
    "/show": Command("/show", "every setting, its value, and where it came from", _show),
    "/stats": Command("/stats", "speed of the last answer, size of the state", _stats),
    "/cache": Command(
        "/cache [N]", "the experts on the device; with N: so many slots from now on", _cache
    ),
    "/think": Command("/think on|off|auto", "think before answering", _think, tuple(THINK)),
    "/mode": Command(
        "/mode denoise|ar|draft|auto",
        "block diffusion, one token a forward, verified drafts, or the fastest of these",
        _mode,
        MODES,
    ),
    "/watch": Command(
        "/watch off|block|heat",
        "the active block: hidden, shown, coloured by confidence",
        _watch,
        WATCH,
    ),
    "/exit": Command("/exit", "leave (so does Ctrl-D)", _exit),
}
