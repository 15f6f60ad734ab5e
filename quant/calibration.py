"""Documents as token sequences with masked blocks: what calibration and evaluation run.

A sequence is read as the model meets it: the prompt by the chat template, then the answer. Causally
it runs as commit rows. Each block of an answer also runs as one preview, with a share of its rows
masked: ratios 0.1 ... 1.0 go round, so that every stage of denoising is seen alike. Behind the end
of an answer a block is filled up with padding, as the model has to write there when it generates.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clover_local.config import ModelConfig
from clover_local.errors import CloverError, TokenizerError
from clover_local.quant.documents import Document
from clover_local.tokenizer import Message, Tokenizer

LENGTH = 512
RATIOS = tuple(tenths / 10 for tenths in range(1, 11))
_THINK, _THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class PreviewBlock:
    """One block of a sequence as a preview sees it, behind the first `start` tokens."""

    start: int
    tokens: tuple[int, ...]  # MASK in the masked rows
    masked: tuple[int, ...]  # the masked rows, ascending
    text_rows: int  # rows that hold text of the sequence; padding behind them
    ratio: float  # of masked rows, one of `RATIOS`


@dataclass(frozen=True)
class CalibrationSequence:
    """Tokens from position 0 on, and previews of some of their blocks, by start."""

    tokens: tuple[int, ...]
    previews: tuple[PreviewBlock, ...]
    kind: str = ""

    @property
    def preview_rows(self) -> int:
        """Rows of all previews."""
        return sum(len(block.tokens) for block in self.previews)

    @property
    def rows(self) -> int:
        """Commit rows and preview rows."""
        return len(self.tokens) + self.preview_rows

    def without_previews(self) -> "CalibrationSequence":
        """The same for a model that has no diffusion tensors."""
        return replace(self, previews=())


@dataclass(frozen=True)
class _Text:
    """A document's tokens, and where the model's answers lie in them."""

    tokens: list[int]
    answers: list[range]


def make_sequences(
    documents: Sequence[Document],
    *,
    tokenizer: Tokenizer,
    config: ModelConfig,
    tokens: int,
    seed: int,
    length: int = LENGTH,
    maskings: int = 1,
) -> tuple[CalibrationSequence, ...]:
    """At least `tokens` tokens of sequences, or all there are; the same ones for the same seed.

    Documents are taken by turns, from the kind that has given the fewest tokens so far: a small
    budget too sees every file.

    Args:
        length: most tokens of a sequence; longer documents become several.
        maskings: previews of each block, each with a ratio and rows of its own.

    Raises:
        CloverError: no document gives a sequence; a chat that the template refuses.
        ValueError: a budget or length below 1.
    """
    if tokens < 1 or not 1 <= length <= config.max_position_embeddings:
        raise ValueError(
            f"{tokens} tokens in sequences of {length}, the model takes 1 to "
            f"{config.max_position_embeddings}"
        )
    rng = random.Random(seed)
    kinds: dict[str, list[Document]] = {}
    for document in documents:
        kinds.setdefault(document.kind, []).append(document)
    for of_kind in kinds.values():
        rng.shuffle(of_kind)
    sources = {
        kind: _pieces_of(of_kind, tokenizer=tokenizer, config=config, length=length)
        for kind, of_kind in kinds.items()
    }
    masks = _Masks(config, rng, maskings)
    taken = dict.fromkeys(sources, 0)
    sequences: list[CalibrationSequence] = []
    while sources and sum(taken.values()) < tokens:
        kind = min(sources, key=taken.__getitem__)
        piece = next(sources[kind], None)
        if piece is None:
            del sources[kind]
            continue
        taken[kind] += len(piece.tokens)
        previews = tuple(masks.blocks(piece))
        sequences.append(CalibrationSequence(tuple(piece.tokens), previews, kind))
    if not sequences:
        raise CloverError("the texts give no sequence of two tokens: pass a longer file")
    return tuple(sequences)


def _pieces_of(
    documents: Sequence[Document], *, tokenizer: Tokenizer, config: ModelConfig, length: int
) -> Iterator[_Text]:
    """The documents' tokens in pieces of at most `length`."""
    for document in documents:
        text = _tokenize(document, tokenizer, config)
        for start in range(0, len(text.tokens), length):
            piece = text.tokens[start : start + length]
            # A piece that starts inside a text has no prompt: its first block serves as one.
            first = start + config.block_size if start else 0
            answers = [
                range(max(answer.start, first) - start, min(answer.stop - start, len(piece)))
                for answer in text.answers
            ]
            if len(piece) > 1:
                yield _Text(piece, [answer for answer in answers if answer])


def _tokenize(document: Document, tokenizer: Tokenizer, config: ModelConfig) -> _Text:
    """The chat as the model meets it.

    Prompts and answers are encoded apart, because that is where a prompt ends when the model
    generates. Without a chat template the contents follow each other as plain text, of which the
    first block serves as the prompt.
    """
    if not tokenizer.has_template:
        tokens = tokenizer.encode("\n\n".join(_content(m) for m in document.messages))
        return _Text(tokens, [range(min(config.block_size, len(tokens)), len(tokens))])
    try:
        text, spans = _render(document, tokenizer)
    except TokenizerError as error:
        raise CloverError(
            f"document {document.title!r} of {document.kind}: {error}; or pass another text"
        ) from None
    tokens, answers, end = [], [], 0
    for span in spans:
        tokens += tokenizer.encode(text[end : span.start])
        answer = tokenizer.encode(text[span.start : span.stop])
        answers.append(range(len(tokens), len(tokens) + len(answer)))
        tokens += answer
        end = span.stop
    return _Text(tokens + tokenizer.encode(text[end:]), answers)


def _render(document: Document, tokenizer: Tokenizer) -> tuple[str, list[range]]:
    """The chat as text, and where the model's answers lie in it, ends of turn included."""
    messages = document.messages
    tools = document.tools or None
    full = tokenizer.render(messages, tools=tools, add_generation_prompt=False)
    if messages[-1]["role"] != "assistant":
        return full, _answers_in(full, messages)
    answer = _content(messages[-1]).strip()
    thinks = answer.startswith(_THINK)
    prompt = tokenizer.render(
        messages[:-1], tools=tools, enable_thinking=thinks if tokenizer.can_think else None
    )
    if thinks and prompt.rstrip().endswith(_THINK):
        answer = answer.removeprefix(_THINK).lstrip("\n")
    text = prompt + answer + _closing(full, answer)
    return text, [*_answers_in(prompt, messages[:-1]), range(len(prompt), len(text))]


def _closing(full: str, answer: str) -> str:
    """What the template writes behind the last answer on its line: the token that ends a turn."""
    final = answer.rpartition(_THINK_END)[2].strip()
    start = full.rfind(final)
    return full[start + len(final) :].partition("\n")[0] if final and start >= 0 else ""


def _answers_in(text: str, messages: Sequence[Message]) -> list[range]:
    """The model's messages in a rendered chat, without their thinking, which templates drop.

    One that the template changed in another way is left out.
    """
    spans, position = [], 0
    for message in messages:
        content = _content(message).rpartition(_THINK_END)[2].strip()
        start = text.find(content, position)
        if not content or start < 0:
            continue
        position = start + len(content)
        if message["role"] == "assistant":
            line = text.find("\n", position)
            spans.append(range(start, line if line >= 0 else len(text)))
    return spans


def _content(message: Message) -> str:
    return str(message["content"])


class _Masks:
    """Masks blocks with ratios that go round in tens, each ten in its own order."""

    def __init__(self, config: ModelConfig, rng: random.Random, maskings: int) -> None:
        self.config = config
        self.rng = rng
        self.maskings = maskings
        self.left: list[float] = []
        fillers = (config.pad_token_id, *config.eos_token_id)
        self.filler = next((token for token in fillers if token is not None), None)

    def blocks(self, text: _Text) -> Iterator[PreviewBlock]:
        """The blocks that tile the answers of `text`."""
        size = self.config.block_size
        for answer in text.answers:
            for start in range(answer.start, answer.stop, size):
                tokens = text.tokens[start : min(start + size, answer.stop)]
                for _ in range(self.maskings):
                    yield self._block(tokens, start)

    def _block(self, tokens: list[int], start: int) -> PreviewBlock:
        if not self.left:
            self.left = list(RATIOS)
            self.rng.shuffle(self.left)
        ratio = self.left.pop()
        padding = [] if self.filler is None else [self.filler]
        padding *= self.config.block_size - len(tokens)
        rows = [
            *self._chosen(range(len(tokens)), ratio),
            *self._chosen(range(len(tokens), len(tokens) + len(padding)), ratio),
        ]
        masked = tuple(sorted(rows))
        shown = tokens + padding
        for row in masked:
            shown[row] = self.config.mask_token_id
        return PreviewBlock(start, tuple(shown), masked, len(tokens), ratio)

    def _chosen(self, rows: range, ratio: float) -> list[int]:
        """A random share of `rows`, at least one of them."""
        return self.rng.sample(rows, max(round(ratio * len(rows)), 1)) if rows else []
