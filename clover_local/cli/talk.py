"""A running chat, and what a slash command is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from clover_local.chat import AnswerStream, Conversation
from clover_local.decoding.result import GenerationResult
from clover_local.decoding.settings import ResolvedSettings
from clover_local.errors import SettingsError
from clover_local.session import OpenModel, Session


@dataclass
class ChatState:
    """A running chat: what the commands read and change."""

    session: Session
    conversation: Conversation
    resolved: ResolvedSettings
    watch: str = "block"
    thinking: str = "show"
    last: GenerationResult | None = None
    sources: dict[str, str] = field(default_factory=dict)
    """Where what is no field of `Settings` came from (`system`, `device`, ...); or default."""
    attached: str = ""
    """Text that goes before the next question."""
    show: "Callable[[ChatState, AnswerStream], None] | None" = None
    """Shows an answer while it is made; None: in silence."""
    load: Callable[[OpenModel, ResolvedSettings], Session] | None = None
    """Loads the weights of another model, with the flags of this chat."""

    def use(self, resolved: ResolvedSettings) -> None:
        """Makes these the settings of the next answer."""
        self.resolved = resolved
        self.conversation.generator.settings = resolved.settings

    def answer(self, events: AnswerStream) -> None:
        """Makes an answer, and shows it."""
        if self.show is not None:
            self.show(self, events)
            return
        for _ in events:
            pass
        self.last = self.conversation.generator.result

    def question(self, text: str) -> str:
        """A question with what was attached to it, which is used up."""
        attached, self.attached = self.attached, ""
        return f"{attached}\n\n{text}" if attached else text


@dataclass(frozen=True)
class Command:
    """One slash command.

    `choices` are the values that it takes, or finds them; `more` is what `/help COMMAND` adds. A
    usage of one word takes no argument.
    """

    usage: str
    help: str
    run: Callable[[ChatState, str], None]
    choices: tuple[str, ...] | Callable[[str], Iterable[str]] = ()
    more: tuple[str, ...] = ()


def choice(command: str, argument: str, choices: tuple[str, ...]) -> str:
    """`argument`, if it is one of `choices`.

    Raises:
        SettingsError: it is not.
    """
    if argument not in choices:
        raise SettingsError(f"{command} takes {', '.join(choices)}, not {argument!r}")
    return argument
