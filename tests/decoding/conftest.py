"""Models of a few lines: a scripted one, so that tests know every pass, and one of noise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.pick import DeviceBlock
from clover_local.decoding.settings import Settings

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, MASK, STOP, PAD = 50, 49, 48, 47


@dataclass(frozen=True)
class ScriptedOutput:
    logits: Tensor
    expert_ids: tuple[Tensor, ...] = ()
    coresets: tuple[Tensor, ...] = ()
    distinct_experts: Tensor | None = None
    block: DeviceBlock | None = None


@dataclass(frozen=True, kw_only=True)
class ScriptedVerify(ScriptedOutput):
    record: VerifyRecord


class PlainModel:
    """What the models here have in common: a commit changes nothing but which tokens there are."""

    def accept(self, record: VerifyRecord, rows: int, state: SequenceState) -> None:
        assert state.committed is record.before
        advance(state, record.tokens[:rows])

    def offload_stats(self) -> None:
        pass

    def give_up_memory(self) -> None:
        pass


def advance(state: SequenceState, tokens: Sequence[int]) -> None:
    """Commits `tokens` with the recurrent states as they are."""
    kept = state.committed
    state.advance(list(tokens), recurrent=kept.recurrent, conv=kept.conv)


def verified(logits: Tensor, tokens: Sequence[int], state: SequenceState) -> ScriptedVerify:
    """A verify of `tokens` with these logits."""
    record = VerifyRecord(state.committed, tuple(tokens), ())
    return ScriptedVerify(logits, record=record)


@dataclass
class ScriptedModel(PlainModel):
    """Wants token `answer(p)` at position p (from 0) with probability `confidence(p)`.

    Records its calls. Logits at other ids are equal. `before_forward` may raise, as Ctrl-C does.
    `rewrite` may change the logits [rows, V] of a forward, whose first row stands at a position.
    """

    config: ModelConfig
    answer: Callable[[int], int] = lambda position: position % 40
    confidence: Callable[[int], float] = lambda position: 0.99
    can_preview: bool = True
    device: torch.device = CPU
    before_forward: Callable[[int], None] = lambda forwards: None
    rewrite: Callable[[Tensor, int], None] = lambda logits, start: None
    experts_counted: int | None = None
    commits: list[list[int]] = field(default_factory=list)
    previews: list[list[int]] = field(default_factory=list)
    verifies: list[list[int]] = field(default_factory=list)
    logits_asked: list[str] = field(default_factory=list)

    def commit(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last", "none"] = "last",
        kind: Literal["commit", "prompt"] = "commit",
    ) -> ScriptedOutput:
        self.before_forward(len(self.commits) + len(self.previews) + len(self.verifies))
        self.commits.append(list(tokens))
        self.logits_asked.append(logits)
        advance(state, tokens)
        asked = {"all": len(tokens), "last": 1, "none": 0}[logits]
        return ScriptedOutput(self._rows(state.length + 1 - asked, asked))

    def verify(self, tokens: Sequence[int], state: SequenceState) -> ScriptedVerify:
        self.before_forward(len(self.commits) + len(self.previews) + len(self.verifies))
        self.verifies.append(list(tokens))
        state.reserve(len(tokens))
        return verified(self._rows(state.length + 1, len(tokens)), tokens, state)

    def preview(self, block: Sequence[int], state: SequenceState) -> ScriptedOutput:
        self.before_forward(len(self.commits) + len(self.previews) + len(self.verifies))
        self.previews.append(list(block))
        # Two distinct experts; three in the layer of `experts + 1`.
        experts = torch.tensor([[0, 1], [1, -1]])
        return ScriptedOutput(
            self._rows(state.length, len(block)),
            (experts, experts + 1),
            (torch.tensor([0, 1]), torch.tensor([0, 1, 2])),
            None if self.experts_counted is None else torch.tensor(self.experts_counted),
        )

    def _rows(self, start: int, rows: int) -> Tensor:
        logits = torch.zeros(rows, VOCABULARY)
        for row in range(rows):
            p = self.confidence(start + row)
            others = VOCABULARY - 2  # MASK is banned, so it has no share
            logits[row, self.answer(start + row)] = math.log(p / (1 - p) * others)
        self.rewrite(logits, start)
        return logits


@dataclass
class Noisy(PlainModel):
    """Logits are noise that depends on the position and on what is fixed in the block.

    Above all of it stands the token that every preview wants, if there is one.
    """

    config: ModelConfig
    keeps_block: bool = False
    wanted: int | None = None
    before_preview: Callable[[int], None] = lambda previews: None
    device: torch.device = DEVICE
    can_preview: bool = True
    block: DeviceBlock | None = None
    sent: int = 0
    previews: int = 0

    def commit(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last", "none"] = "last",
        kind: Literal["commit", "prompt"] = "commit",
    ) -> ScriptedOutput:
        advance(state, tokens)
        return ScriptedOutput(noise([state.length], salt=0))

    def preview(self, block: Sequence[int], state: SequenceState) -> ScriptedOutput:
        self.before_preview(self.previews)
        self.previews += 1
        if self.keeps_block:
            self._keep(list(block))
        positions = range(state.length, state.length + len(block))
        logits = noise(positions, salt=sum(block))
        if self.wanted is not None:
            logits[:, self.wanted] = 12.0
        return ScriptedOutput(logits, block=self.block)

    def verify(self, tokens: Sequence[int], state: SequenceState) -> ScriptedVerify:
        positions = range(state.length + 1, state.length + 1 + len(tokens))
        return verified(noise(positions, salt=0), tokens, state)

    def _keep(self, block: list[int]) -> None:
        """The block on the device, sent only where it is not there by now."""
        if self.block is None or len(self.block.ids) != len(block):
            self.block = DeviceBlock(torch.zeros(len(block), dtype=torch.int64, device=DEVICE), [])
        if self.block.host != block:
            self.sent += 1
            self.block.ids.copy_(torch.tensor(block))
            self.block.host = list(block)
        assert self.block.ids.tolist() == block


def noise(positions: Sequence[int], *, salt: int) -> Tensor:
    """[rows, V]; rows of a position and salt are always the same."""
    rows = [
        torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1000 * p + salt % 997))
        for p in positions
    ]
    return (torch.stack(rows) * 2).to(DEVICE)


@dataclass(frozen=True)
class Scripted:
    """Makes scripted models, states that fit them, and settings."""

    config: ModelConfig

    def model(self, **given: Any) -> ScriptedModel:
        return ScriptedModel(self.config, **given)

    def state(self, context: int = 500) -> SequenceState:
        return SequenceState(self.config, context=context, device=CPU, dtype=torch.float32)

    def settings(self, **given: Any) -> Settings:
        values: dict[str, Any] = {
            "mask_token_id": MASK,
            "vocab_size": VOCABULARY,
            "stop_ids": (PAD, STOP),
        }
        return Settings(**{**values, **given})


@pytest.fixture
def scripted(golden_config: ModelConfig) -> Scripted:
    config = replace(golden_config, vocab_size=VOCABULARY, mask_token_id=MASK, num_hidden_layers=2)
    return Scripted(config)


@pytest.fixture(params=[0, 15, 31])
def stop_row(request: pytest.FixtureRequest) -> int:
    """Rows of a block at which a stop token stands."""
    return int(request.param)
