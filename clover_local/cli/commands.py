"""The slash commands of `clover-local chat`: what each is for, and the small ones."""

import difflib
import reprlib
from dataclasses import asdict

from clover_local.cli import console, sessions, setting, thinking, turns
from clover_local.cli.heat import HEAT, NAMES
from clover_local.cli.preferences import THINKING, WATCH
from clover_local.cli.status import offload_rows, size, stats_rows
from clover_local.cli.talk import ChatState, SlashCommand, as_count, one_of
from clover_local.decoding.keys import MODES
from clover_local.decoding.settings import Place
from clover_local.errors import SettingsError

WITHOUT_WEIGHTS = ("/exit", "/help", "/model", "/save", "/sessions")
"""Commands that also run where an exchange of the model has left none in memory."""


def execute(line: str, chat: ChatState) -> None:
    """Runs the command in `line`.

    Raises:
        SettingsError: an unknown command (names the nearest) or a wrong argument.
        EOFError: the command was `/exit`.
    """
    name, argument = [*line.split(maxsplit=1), ""][:2]
    if name not in COMMANDS:
        raise SettingsError(f"{_unknown(name)} (a leading space sends it as a question)")
    command, argument = COMMANDS[name], argument.strip()
    if argument and " " not in command.usage:
        raise SettingsError(f"{name} takes nothing after it: {argument!r} is too much")
    if name not in WITHOUT_WEIGHTS:
        chat.restore()
    command.run(chat, argument)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    return f"unknown command {name}: {f'did you mean {near[0]}?' if near else '/help lists all'}"


def _help(chat: ChatState, argument: str) -> None:
    if argument:
        name = f"/{argument.removeprefix('/')}"
        if name not in COMMANDS:
            raise SettingsError(_unknown(name))
        command = COMMANDS[name]
        console.show_table(command.usage, [(command.help,), *((more,) for more in command.more)])
        return
    console.show_table("Commands", [(command.usage, command.help) for command in COMMANDS.values()])
    console.text(
        'Alt-Enter or """ makes a question of several lines; Ctrl-O opens it in $EDITOR; '
        "Ctrl-R searches earlier ones; Tab completes commands, keys, values and files."
    )
    console.text("Ctrl-C stops an answer, and what was written of it stays in the conversation.")


def _new(chat: ChatState, argument: str) -> None:
    chat.conversation.new()
    chat.attached = ""
    console.note("a new conversation")


def _system(chat: ChatState, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "none" else argument
        chat.sources["system"] = Place.SYSTEM
    console.text(f"system: {chat.conversation.system or 'none'}")


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
        slots = as_count(argument)
        if slots is None:
            raise SettingsError(f"/cache takes a number of slots, not {reprlib.repr(argument)}")
        experts.resize(slots)
        stats = experts.stats()
    if stats is not None:
        console.show_table("Experts on the device", offload_rows(stats))


def _watch(chat: ChatState, argument: str) -> None:
    if argument:
        chat.watch = one_of(WATCH, argument, command="/watch")
        chat.sources["watch"] = Place.WATCH
    console.text(f"watch: {chat.watch}")


def _exit(chat: ChatState, argument: str) -> None:
    raise EOFError


COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand(
        "/help [COMMAND]", "this list, or more on one of them", _help, lambda typed: COMMANDS
    ),
    "/new": SlashCommand("/new", "forget the conversation; the system prompt stays", _new),
    "/regen": SlashCommand(
        "/regen",
        "answer the last question again",
        turns.regen,
        more=("With a temperature above 0 it takes the next seed; without, the same text again.",),
    ),
    "/undo": SlashCommand("/undo", "take the last question and its answer back", turns.undo),
    "/edit": SlashCommand(
        "/edit",
        "change the last question in $EDITOR, and ask it",
        turns.edit,
        more=("$VISUAL comes first; without either it is vi. Unchanged, nothing is asked.",),
    ),
    "/read": SlashCommand(
        "/read FILE",
        "a text before the next question; `none`: no",
        turns.read,
        turns.paths,
        more=(
            "Type your question after it: the model gets the text of the file first, then the",
            "question. It goes with one question only, and waits if that one fails.",
            "Several files go in the order read; without FILE: how much waits.",
        ),
    ),
    "/copy": SlashCommand("/copy", "the last answer to the clipboard (OSC 52)", turns.copy),
    "/save": SlashCommand(
        "/save NAME", "keep the conversation in a file", sessions.save, sessions.names
    ),
    "/load": SlashCommand("/load NAME", "go on with a saved one", sessions.load, sessions.names),
    "/sessions": SlashCommand("/sessions", "the saved conversations", sessions.sessions),
    "/model": SlashCommand(
        "/model [NAME]", "the model; with NAME: go on with another", sessions.model, sessions.models
    ),
    "/system": SlashCommand(
        "/system TEXT", "set the system prompt; `none` removes it", _system, ("none",)
    ),
    "/set": SlashCommand(
        "/set KEY VALUE",
        "change a setting",
        setting.set_,
        setting.keys_and_values,
        more=(
            "/set: what was changed. /set KEY: its value, and what it takes.",
            "/set KEY default: the model's own value again.",
        ),
    ),
    "/show": SlashCommand(
        "/show [KEY]",
        "every setting, its value, and where it came from",
        setting.show,
        setting.shown_keys,
    ),
    "/stats": SlashCommand("/stats", "speed of the last answer, size of the state", _stats),
    "/cache": SlashCommand(
        "/cache [N]",
        "the experts on the device; with N: so many slots from now on",
        _cache,
        more=(
            "The model has many experts (parts of its weights), and each token uses a few. A slot",
            "is the room of one expert on the device. More slots take more memory and wait less",
            "for experts from the host's. Every layer has its share; the text stays the same.",
        ),
    ),
    "/think": SlashCommand(
        "/think on|off|auto|N",
        "think before answering; for N tokens at most",
        thinking.think,
        tuple(thinking.THINK),
        more=(
            "auto leaves it to the chat template.",
            "N sets think_end_start to N, think_end_bias and think_end_window to values that make",
            "the end certain there; a block has it once, where it is surest.",
        ),
    ),
    "/thinking": SlashCommand(
        "/thinking [show|fold]",
        "what the last answer thought; or show it dimmed, or folded to a line",
        thinking.thinking,
        THINKING,
        more=(
            "Thinking is what a model writes for itself before the answer; /think turns it on.",
            "show: it appears, dimmed, above the answer. fold: one line says how much there was.",
            "/thinking alone prints all that the last answer thought.",
        ),
    ),
    "/mode": SlashCommand(
        "/mode denoise|ar|draft|auto",
        "block diffusion, one token a forward, verified drafts, or the fastest of these",
        setting.mode,
        MODES,
        more=(
            "denoise: a block of tokens begins masked and is filled in over a few passes.",
            "ar: one token after the other, each from one forward, as other models write.",
            "draft: tokens are guessed ahead, and kept where ar would have written them too.",
            "auto: measures these while it answers, and goes on with the fastest.",
        ),
    ),
    "/watch": SlashCommand(
        "/watch off|block|heat",
        "the active block: hidden, shown, coloured by confidence",
        _watch,
        WATCH,
        more=(
            "The active block is the part of the answer that is still being filled in (`/mode`).",
            "off: text appears when it is final. block: the block shows, masks and all.",
            "heat: its tokens are coloured by how sure the model is: "
            + ", ".join(f"{NAMES[code]} {bound}" for _, code, bound in HEAT)
            + ".",
        ),
    ),
    "/exit": SlashCommand("/exit", "leave (so does Ctrl-D)", _exit),
}
