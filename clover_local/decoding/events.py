"""What a run reports while it works: the command line, a server and tests all read these."""

from collections import abc
from dataclasses import dataclass

from clover_local.decoding.result import Fixed, GenerationResult


@dataclass(frozen=True)
class PromptProgress:
    """A chunk of the prompt is committed."""

    committed: int  # prompt tokens in the state by now, reused ones included
    total: int


@dataclass(frozen=True)
class PromptCommitted:
    """The whole prompt is committed; the answer begins."""

    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class PassDone:
    """One preview over the active block is done; nothing of it is committed yet.

    In `draft` the block is the drafts, without the pending token before them.
    """

    block: int  # from 0
    start: int  # committed length: the position of row 0
    pass_number: int  # from 0
    tokens: tuple[int, ...]  # the block after this pass; MASK where a row is still open
    fixed: tuple[Fixed, ...]  # rows of this pass, ascending
    milliseconds: float
    picked: tuple[Fixed, ...] = ()  # all rows that were masked, also those that stay so


@dataclass(frozen=True)
class BlockCommitted:
    """Tokens are emitted. In `ar` it is one, which the next forward, or the next turn, commits.

    In `draft` they are those of a round, of which the last one waits likewise.
    """

    block: int
    start: int  # the position of the first of them
    tokens: tuple[int, ...]  # a stop token may be the last


@dataclass(frozen=True)
class Finished:
    """The last event of a run that was not interrupted."""

    result: GenerationResult


Event = PromptProgress | PromptCommitted | PassDone | BlockCommitted | Finished
EventStream = abc.Generator[Event, None, None]
"""Events as they come; `close()` ends what makes them."""
