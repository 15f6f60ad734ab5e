"""A conversation: messages in, an answer out, thinking told apart from what is meant to be read.

Every question renders the whole conversation anew and hands the ids to the generator, which commits
only what differs from its state. Thinking stays in the history as `<think>...</think>`, so that the
chat template decides what becomes of it.
"""

from collections import abc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from itertools import groupby

from clover_local.decoding.events import BlockCommitted, Event, Finished
from clover_local.errors import SettingsError
from clover_local.generate import Generator
from clover_local.tokenizer import Message, TextStream, Tokenizer

AnswerStream = abc.Generator["Event | Piece", None, None]
"""The events of one answer and the text it grows by; `close()` cancels it."""

THINK_START = "<think>"
THINK_END = "</think>"
WORTH_KEEPING = 16
"""Tokens before a question from which on their state is worth a checkpoint and a forward."""


@dataclass(frozen=True)
class Piece:
    """Text by which an answer grew, and of how many tokens it is."""

    text: str
    thinking: bool
    tokens: int = field(default=0, compare=False)


class AnswerReader:
    """Turns an answer's token ids into text, thinking and visible text apart.

    The think tokens are recognised by id and are part of neither text; so are the line breaks
    around them. Everything else, tool calls among it, is text as the tokenizer decodes it. Stop ids
    have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, stop_ids: Sequence[int]) -> None:
        """`thinking`: the prompt has opened the thinking already."""
        self._thinking, self._visible = StringIO(), StringIO()
        self.is_thinking = thinking
        self._stream = TextStream(tokenizer)
        self._waiting = 0  # tokens whose text is not told yet
        self._after_tag = thinking  # line breaks that follow belong to the tag
        self._start_id = tokenizer.id_of(THINK_START)
        self._end_id = tokenizer.id_of(THINK_END)
        self._stop_ids = frozenset(stop_ids)

    @property
    def thinking(self) -> str:
        """What was thought so far."""
        return self._thinking.getvalue()

    @property
    def visible(self) -> str:
        """What was written so far."""
        return self._visible.getvalue()

    def push(self, tokens: Sequence[int]) -> list[Piece]:
        """The text that `tokens` add; bytes of an incomplete character wait for the next call."""
        pieces = [piece for token in tokens for piece in self._read(token)]
        groups = groupby(pieces, key=lambda piece: piece.thinking)
        return [_joined([*group], thinking=thinking) for thinking, group in groups]

    def flush(self) -> list[Piece]:
        """What is left of an incomplete character."""
        return self._grow(self._stream.flush())

    def content(self) -> str:
        """The answer as the assistant's message; thinking that was cut short is closed."""
        thinking = self.thinking.strip()
        if not thinking:
            return self.visible
        return f"{THINK_START}\n{thinking}\n{THINK_END}\n\n{self.visible}"

    def _read(self, token: int) -> list[Piece]:
        if token in self._stop_ids:
            return []
        if token in (self._start_id, self._end_id):  # a second one of a kind changes nothing
            rest = self.flush()
            self.is_thinking = token == self._start_id
            self._after_tag = True
            self._waiting = 0
            return rest
        self._waiting += 1
        return self._grow(self._stream.push([token]))

    def _grow(self, text: str) -> list[Piece]:
        if self._after_tag:
            text = text.lstrip("\n")
        if not text:
            return []
        self._after_tag = False
        (self._thinking if self.is_thinking else self._visible).write(text)
        tokens, self._waiting = self._waiting, 0
        return [Piece(text, self.is_thinking, tokens)]


def _joined(pieces: Sequence[Piece], *, thinking: bool) -> Piece:
    text = "".join(piece.text for piece in pieces)
    return Piece(text, thinking, sum(piece.tokens for piece in pieces))


class Conversation:
    """Messages so far, and the generator that answers them.

    `system` and `thinking` may be changed between two questions. `thinking` None leaves the choice
    to the template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        generator: Generator,
        *,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.generator = generator
        self.system = system
        self.thinking = thinking
        self.messages: list[Message] = []
        self._reader: AnswerReader | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether the answer that is being made, or was made last, is still in its thinking."""
        return self._reader is not None and self._reader.is_thinking

    def new(self) -> None:
        """Forgets every question and answer; the system prompt stays."""
        self.messages.clear()

    def ask(self, question: str) -> AnswerStream:
        """Asks, and yields the generator's events, and after a committed block the text it adds.

        An answer that is cancelled (the iterator closed, or KeyboardInterrupt in it) stays in the
        history as far as it was committed; a question that got no token at all is taken back, also
        after an error.

        Raises:
            SettingsError: nothing asked.
            TokenizerError: the chat template refuses the conversation.
            ContextError: the conversation does not fit the context.
        """
        if not question.strip():
            raise SettingsError("the question is empty: type some text")
        self.messages.append({"role": "user", "content": question})
        reader: AnswerReader | None = None
        finished = False
        try:
            prompt_ids, reader, checkpoints = self._prompt()
            self._reader = reader
            with closing(self.generator.run(prompt_ids, checkpoints=checkpoints)) as events:
                for event in events:
                    yield event
                    if isinstance(event, BlockCommitted):
                        yield from reader.push(event.tokens)
                    finished = isinstance(event, Finished)
            yield from reader.flush()
        finally:
            if reader is not None and (finished or reader.thinking or reader.visible):
                self.messages.append({"role": "assistant", "content": reader.content()})
            else:
                self.messages.pop()

    @property
    def last_question(self) -> str:
        """The question that was answered last.

        Raises:
            SettingsError: there is none.
        """
        if not self.messages:
            raise SettingsError("nothing was asked yet: type a question first")
        return str(self.messages[-2]["content"])

    @property
    def last_answer(self) -> str:
        """What was visible of the last answer.

        Raises:
            SettingsError: there is none.
        """
        return self._last_content()[1]

    @property
    def last_thinking(self) -> str:
        """What the last answer thought; empty where it did not think.

        Raises:
            SettingsError: there is no answer.
        """
        return self._last_content()[0]

    def _last_content(self) -> tuple[str, str]:
        """(thinking, visible text) of the last answer."""
        if not self.messages:
            raise SettingsError("there is no answer yet: type a question first")
        content = str(self.messages[-1]["content"])
        if not content.startswith(THINK_START):
            return "", content
        thinking, _, visible = content.removeprefix(THINK_START).partition(f"{THINK_END}\n\n")
        return thinking.strip(), visible

    def undo(self) -> str:
        """Takes the last question and its answer back; returns the question.

        Raises:
            SettingsError: there is none.
        """
        question = self.last_question
        del self.messages[-2:]
        return question

    def ask_again(self, question: str | None = None) -> AnswerStream:
        """Asks the last question anew, or another one in its place.

        The state goes back to where the two differ. Where no token comes of it, the old answer
        stays.

        Raises:
            SettingsError: nothing was asked yet.
            CloverError: as `ask`.
        """
        asked = self.last_question
        before = self.messages[-2:]
        del self.messages[-2:]
        length = len(self.messages)
        try:
            yield from self.ask(asked if question is None else question)
        finally:
            if len(self.messages) == length:
                self.messages += before

    def _prompt(self) -> tuple[list[int], AnswerReader, list[int]]:
        """Ids of the conversation up to where the answer starts; its reader; checkpoints.

        What a template writes to start an answer (`<think>`, say) it may write differently once
        the answer is history: the next prompt parts from this one before it.
        """
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages = system + self.messages
        render = partial(self.tokenizer.render, messages, enable_thinking=self.thinking)
        text, history = render(), render(add_generation_prompt=False)
        prompt_ids, history_ids = self.tokenizer.encode(text), self.tokenizer.encode(history)
        opening = text.removeprefix(history) if text.startswith(history) else ""
        reader = AnswerReader(
            self.tokenizer,
            thinking=THINK_START in opening.rpartition(THINK_END)[2],
            stop_ids=self.generator.settings.stop_ids,
        )
        points = []
        start = self._start_of_question(messages, prompt_ids)
        if start >= WORTH_KEEPING:
            points.append(start)
        if history_ids and history_ids == prompt_ids[: len(history_ids)]:
            points.append(len(history_ids))
        return prompt_ids, reader, points

    def _start_of_question(self, messages: list[Message], prompt_ids: list[int]) -> int:
        """How many tokens of a prompt do not depend on its last question."""
        question = str(messages[-1]["content"])
        other: Message = {"role": "user", "content": "!" if question[0] != "!" else "?"}
        text = self.tokenizer.render([*messages[:-1], other], enable_thinking=self.thinking)
        ids = self.tokenizer.encode(text)
        pairs = enumerate(zip(prompt_ids, ids, strict=False))
        return next((i for i, (own, its) in pairs if own != its), 0)
