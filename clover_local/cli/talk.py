"""A running chat, and what a slash command is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from clover_local.chat import AnswerStream, Conversation
from clover_local.cli.preferences import ThinkingView, Watch
from clover_local.decoding.result import GenerationResult
from clover_local.decoding.settings import ResolvedSettings
from clover_local.errors import SettingsError
from clover_local.session import OpenModel, Session

Word = TypeVar("Word", bound=str)


@dataclass
class ChatState:
    """A running chat: what the commands read and change."""

    session: Session
    conversation: Conversation
    resolved: ResolvedSettings
    watch: Watch = "block"
    thinking: ThinkingView = "show"
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
class SlashCommand:
    """One slash command.

    `choices` are the values that it takes, or finds them; `more` is what `/help COMMAND` adds. A
    usage of one word takes no argument.
    """

    usage: str
    help: str
    run: Callable[[ChatState, str], None]
    choices: tuple[str, ...] | Callable[[str], Iterable[str]] = ()
    more: tuple[str, ...] = ()


def one_of(choices: tuple[Word, ...], argument: str, *, command: str) -> Word:
    """The one of `choices` that `argument` is.

    Raises:
        SettingsError: none; says what `command` takes.
    """
    for word in choices:
        if word == argument:
            return word
    raise SettingsError(f"{command} takes {', '.join(choices)}, not {argument!r}")
