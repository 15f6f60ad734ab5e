"""A running chat, and what a slash command is."""

import reprlib
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
LONGEST_COUNT = 18  # digits


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

    gone: OpenModel | None = None
    """The model that another one should have replaced; `restore` loads its weights again."""

    @property
    def opened(self) -> OpenModel:
        """The files of the model that answers."""
        return self.gone or self.session.opened

    def unload(self) -> None:
        """Lets go of the weights, whose memory another model takes."""
        if self.gone is None:
            self.gone = self.session.opened
            del self.session, self.conversation.generator

    def restore(self) -> None:
        """Loads the weights again that `unload` let go, and no other model has replaced."""
        if self.gone is not None and self.load is not None:
            self.session = self.load(self.gone, self.resolved)
            self.conversation.generator = self.session.generator
            self.gone = None

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

    def ask(self, question: str) -> AnswerStream:
        """Asks a question with what was attached to it.

        The attachment is used up by a question that stays in the conversation. Errors as
        `Conversation.ask`.
        """
        self.restore()
        return self._asked(question)

    def _asked(self, question: str) -> AnswerStream:
        attached, before = self.attached, len(self.conversation.messages)
        self.attached = ""
        try:
            text = f"{attached}\n\n{question}" if attached else question
            yield from self.conversation.ask(text)
        finally:
            if len(self.conversation.messages) == before:
                self.attached = attached


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


def as_count(argument: str) -> int | None:
    """The number of things that `argument` is, `1,000` also; None: none that anybody has."""
    digits = argument.replace(",", "")
    return int(digits) if digits.isdecimal() and len(digits) <= LONGEST_COUNT else None


def one_of(choices: tuple[Word, ...], argument: str, *, command: str) -> Word:
    """The one of `choices` that `argument` is.

    Raises:
        SettingsError: none; says what `command` takes.
    """
    for word in choices:
        if word == argument:
            return word
    raise SettingsError(f"{command} takes {', '.join(choices)}, not {reprlib.repr(argument)}")
