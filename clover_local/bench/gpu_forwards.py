"""A model of random weights through the decoding loop on a GPU: its forwards, passes and a prompt.

The model, its graphs, the picker and the generator are those that answer users; only the weights
are random. So a pass accepts one row, the most confident one: a block has as many passes as rows.
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.bench.card import Card
from clover_local.bench.floor import Widths, operators
from clover_local.bench.models import random_model, widths
from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.device_pick import DevicePicker
from clover_local.decoding.events import BlockCommitted, PassDone, PromptCommitted
from clover_local.decoding.on_device.inputs import Inputs, Room
from clover_local.decoding.settings import Settings
from clover_local.generate import Generator
from clover_local.kernels import dispatch
from clover_local.kernels.gpu.sampling import accept
from clover_local.kernels.gpu.sampling.sample import sample
from clover_local.model.graphs import GraphedClover
from clover_local.model.output import PassOutput


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    prefix: int = 256  # tokens committed before the forwards
    commit_rows: int = 32
    blocks: int = 3  # of the answer whose passes are timed; in the first ones graphs are captured
    prompt: int = 4000
    chunk: int = 2048  # of a prompt, at once


@dataclass(frozen=True)
class Forward:
    """One kind of forward beside its floor."""

    name: str
    rows: int
    distinct_experts: float  # a layer
    seconds: float
    nbytes: float  # that it cannot do without reading
    floor_seconds: float

    @property
    def ratio(self) -> float:
        """Time by floor; 1 is perfect."""
        return self.seconds / self.floor_seconds


@dataclass(frozen=True)
class Loop:
    """A pass in the generator's loop: what it takes by the clock on the wall, and on the device."""

    wall_seconds: float
    pass_seconds: float
    pick_seconds: float

    @property
    def host_share(self) -> float:
        """Of the time of a pass, how much the device has nothing to do."""
        return 1 - (self.pass_seconds + self.pick_seconds) / self.wall_seconds


@dataclass(frozen=True)
class Prompt:
    """A prompt, until all of it is committed and until the first block behind it is."""

    tokens: int
    seconds: float
    first_block_seconds: float  # from the start

    @property
    def tokens_per_second(self) -> float:
        """Of the prompt alone."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Rate:
    """What a floor rests on; both measured in the same run."""

    bytes_per_second: float
    empty_graph_seconds: float

    def floor(self, nbytes: float) -> float:
        """The least time of a graph that reads so many bytes."""
        return nbytes / self.bytes_per_second + self.empty_graph_seconds


def least_bytes(
    config: ModelConfig, widths: Widths, *, rows: int, committed: int, distinct: float
) -> float:
    """What a forward has to read: weights in use, state, keys and values.

    Args:
        distinct: experts in use, summed over the layers.
    """
    uses = rows * config.num_experts_per_tok * config.num_hidden_layers
    parts = operators(
        config,
        rows=rows,
        committed=committed,
        expert_uses=uses,
        distinct=distinct,
        widths=widths,
    )
    return sum(part.bytes for part in parts)


class Bench:
    """One model and the state of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        card: Card,
        *,
        sizes: Sizes,
        head_bits: int,
        device: torch.device,
        dtype: torch.dtype,
        on_fallback: Callable[[str], None],
        seed: int = 0,
    ) -> None:
        """Makes the weights on the device: INT4 experts, an INT8 trunk, a head of `head_bits`."""
        self._config, self._card, self._sizes = config, card, sizes
        clover = random_model(
            config, weights="int4", head_bits=head_bits, seed=seed, device=device, dtype=dtype
        )
        self._widths = widths(clover)
        self._model = GraphedClover(clover, on_fallback=on_fallback)
        context = config.max_position_embeddings
        self._state = SequenceState(config, context=context, device=device, dtype=dtype)
        self._settings = Settings(
            config.mask_token_id,
            config.vocab_size,
            max_new_tokens=sizes.blocks * config.block_size,
            threshold=1.0,
        )
        self._generator = Generator(
            self._model,
            self._state,
            self._settings,
            prefill_rows=sizes.chunk,
            picker=DevicePicker(device),
        )
        self._tokens = torch.Generator().manual_seed(seed)

    def forwards(self, rate: Rate) -> tuple[Forward, ...]:
        """Times a pass with half of its rows masked, a commit, and an AR token, each as graphs."""
        model, state = self._model, self._state
        model.commit(self._draw(self._sizes.prefix), state, logits="none")
        size = self._config.block_size
        block = self._draw(size - size // 2) + [self._config.mask_token_id] * (size // 2)
        tokens = self._draw(self._sizes.commit_rows)
        return (
            self._forward("pass", size, rate, lambda: model.preview(block, state)),
            self._forward(
                "commit", len(tokens), rate, lambda: model.commit(tokens, state, logits="none")
            ),
            self._forward("AR token", 1, rate, lambda: model.commit(tokens[:1], state)),
        )

    def loop(self, pass_seconds: float) -> Loop:
        """Times passes in the generator's loop, which goes on behind what is committed."""
        prompt = [*self._state.committed.tokens, *self._draw(1)]
        walls: list[float] = []
        began = 0.0
        for event in self._generator.run(prompt):
            if isinstance(event, PassDone):
                now = self._card.now()
                if event.pass_number:  # the first one of a block sends what the host knows
                    walls.append(now - began)
                began = now
        logits = self._model.preview(
            [self._config.mask_token_id] * self._config.block_size, self._state
        ).logits
        pick = self._card.graph(pick_call(logits, self._settings))
        return Loop(statistics.median(walls), pass_seconds, pick)

    def prompt(self) -> Prompt:
        """Times a prompt in chunks and the first block; the second time, when all is compiled."""
        timed = [self._prompt() for _ in range(2)]
        return timed[-1]

    def _prompt(self) -> Prompt:
        tokens = self._draw(self._sizes.prompt)
        began = committed = self._card.now()
        events = self._generator.run(tokens)
        for event in events:
            if isinstance(event, PromptCommitted):
                committed = self._card.now()
            if isinstance(event, BlockCommitted):
                break
        done = self._card.now()
        events.close()
        return Prompt(len(tokens), committed - began, done - began)

    def _forward(self, name: str, rows: int, rate: Rate, call: Callable[[], PassOutput]) -> Forward:
        committed = self._state.length
        outputs: deque[PassOutput] = deque(maxlen=1)
        seconds = self._card.back_to_back(lambda: outputs.append(call()))
        ids = outputs[0].expert_ids
        distinct = float(dispatch.distinct_experts(ids, self._config.num_experts))
        nbytes = least_bytes(
            self._config, self._widths, rows=rows, committed=committed, distinct=distinct
        )
        layers = self._config.num_hidden_layers
        return Forward(name, rows, distinct / layers, seconds, nbytes, rate.floor(nbytes))

    def _draw(self, count: int) -> list[int]:
        """Random tokens, none of them MASK."""
        ids: list[int] = torch.randint(
            0, self._config.mask_token_id, (count,), generator=self._tokens
        ).tolist()
        return ids


def pick_call(logits: Tensor, settings: Settings) -> Callable[[], object]:
    """What the device does behind a pass: statistics of all rows, and the report to the host."""
    rows, device = len(logits), logits.device
    inputs = Inputs(Room(rows=rows), device=device)
    inputs.fill(ResponseControls(settings), rows=rows, visible=(), pass_number=0)
    inputs.send()
    controls, order = inputs.controls(rows), torch.arange(rows, device=device)
    report = torch.zeros(rows, accept.WORDS, dtype=torch.int32, device=device)
    host = torch.zeros(report.shape, dtype=report.dtype, pin_memory=device.type == "cuda")

    def call() -> Tensor:
        sampled, _ = sample(logits, controls, rows=order)
        accept.report_rows(sampled, report=report)
        return host.copy_(report, non_blocking=True)

    return call
