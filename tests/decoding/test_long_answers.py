"""The end of a long answer costs what its start costs: calls, memory, and what torch computes.

Attention alone may grow, with the keys and values that it reads. No clock is asked.
"""

import random
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clover_local.cache import SequenceState
from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.events import BlockCommitted, EventStream, Finished
from clover_local.decoding.settings import Settings
from clover_local.generate import Generator
from clover_local.model.clover import Clover
from tests.decoding.conftest import MASK, Scripted

TOKENS = 4000
STARTS = (1536, 3712)
WINDOW = 256
"""Tokens that are measured, from each of the `STARTS` on."""
OBJECTS_A_TOKEN, BYTES_A_TOKEN = 6, 400
"""Of an answer: its id, confidence, block and mode, in the result and among the committed ids."""
SLACK = 4096
"""Bytes by which the median steps of two windows may differ, since the interpreter keeps some
freed objects; one number for each token of the answer would be four times that."""


class Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of what torch computes or copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = result if isinstance(result, tuple | list) else [result]
            self.count += sum(x.numel() for x in outputs if isinstance(x, Tensor))
        return result


@dataclass
class Costs:
    """Of some steps."""

    calls: int = 0
    elements: int = 0
    tokens: int = 0
    peaks: list[int] = field(default_factory=list)
    """Bytes that Python and numpy held at most in each step, beyond what there was before it."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Adds what is done within it, one step."""

        def count(frame: FrameType, event: str, argument: object) -> None:
            self.calls += event in ("call", "c_call")

        tracemalloc.start()
        with Elements() as elements:
            sys.setprofile(count)
            try:
                yield
            finally:
                sys.setprofile(None)
        self.peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        self.elements += elements.count

    def assert_as(self, early: "Costs", *, more: float = 0.0) -> None:
        """A token costs no more than it did; `more` is a share that is left open."""
        assert self.calls / self.tokens <= (1 + more) * early.calls / early.tokens
        assert self.elements / self.tokens <= (1 + more) * early.elements / early.tokens
        # The median: a list that grows by a leap now and then is no growth of the step.
        assert statistics.median(self.peaks) <= statistics.median(early.peaks) + SLACK


def costs_of(generator: Generator) -> list[Costs]:
    """Those of an answer of `TOKENS` tokens, in each of the windows."""
    windows, done = [Costs() for _ in STARTS], 0
    events = generator.run([1])
    while True:
        inside = [c for c, start in zip(windows, STARTS, strict=True) if 0 <= done - start < WINDOW]
        if inside:
            with inside[0].measured():
                event = next(events, None)
        else:
            event = next(events, None)
        if event is None:
            assert done == TOKENS
            return windows
        if isinstance(event, BlockCommitted):
            done += len(event.tokens)
            for costs in inside:
                costs.tokens += len(event.tokens)


class Nowhere:
    """A trace that keeps nothing."""

    model = model_hash = ""

    def write(self, record: Mapping[str, object]) -> None:
        pass


MODES: dict[str, dict[str, Any]] = {
    "denoise": {"mode": "denoise"},
    "ar": {"mode": "ar"},
    "draft": {"mode": "draft"},
    "auto": {"mode": "auto", "auto": ("draft",)},  # the clock chooses among several
}
PLAIN: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "presence_penalty": 1e-4,
    "frequency_penalty": 1e-6,
    "repetition_penalty": 1.0001,
    "length_penalty": 1e-4,
    "length_penalty_start": 0,
    "min_new_tokens": TOKENS,
    "in_block_repetition": True,
    "no_repeat_ngram": 6,
    "eos_order": True,
    "loop_guard": "raise",
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
}


@pytest.mark.parametrize("controls", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("mode", MODES)
def test_a_token_at_the_end_of_a_long_answer_costs_what_one_at_its_start_does(
    mode: str, controls: dict[str, Any], scripted: Scripted
) -> None:
    letters = random.Random(7).choices(range(40), k=2 * TOKENS)
    model = scripted.model(
        answer=lambda p: letters[p], confidence=lambda p: 0.6 if p % 16 == 3 else 0.99
    )
    settings = scripted.settings(**MODES[mode], max_new_tokens=TOKENS, **controls)
    trace = Nowhere() if controls else None
    generator = Generator(model, scripted.state(TOKENS + 1), settings, trace=trace)
    early, late = costs_of(generator)
    # Draws differ from block to block, and so do the passes that they take.
    late.assert_as(early, more=0.1 if controls else 0.0)


@pytest.mark.parametrize("rows", ["block", "drafts"])
def test_dry_searches_no_more_than_where_the_neighbours_stand(
    rows: str, scripted: Scripted
) -> None:
    def costs_behind(length: int) -> Costs:
        controls, costs = ResponseControls(scripted.settings(dry_multiplier=1.0)), Costs()
        controls.add([*range(100, 100 + length), 1, 2, 3, 1, 2])
        block = [MASK, 3, MASK, 1, 2, *[MASK] * 27]
        places = [place for place, token in enumerate(block) if token == MASK]
        positions = [controls.length + place + 1 for place in places]
        for _ in range(2):  # the first one takes the response in
            costs = Costs(tokens=1)
            with costs.measured():
                acting = (
                    controls.at(positions, visible=block)
                    if rows == "block"
                    else controls.along([3, 1, 2, 3, 1])
                )
        assert acting.dry_costs is not None
        return costs

    costs_behind(TOKENS).assert_as(costs_behind(400))


def test_outside_attention_no_forward_grows(golden_model: Clover) -> None:
    config = golden_model.config
    state = SequenceState(config, context=TOKENS, device="cpu", dtype=torch.float32)
    tokens = [(7 * place) % 500 for place in range(TOKENS)]

    def elements(length: int) -> list[int]:
        """Of a preview, of a verify, and of a commit behind `length` tokens."""
        golden_model.commit(tokens[state.length : length], state, logits="none")
        golden_model.verify(tokens[:64], state)  # buffers that grow are copied, which is rare
        golden_model.commit(tokens[:1], state)
        counts = []
        forwards: list[Callable[[], object]] = [
            lambda: golden_model.preview([config.mask_token_id] * 32, state),
            lambda: golden_model.verify(tokens[:16], state),
            lambda: golden_model.commit(tokens[:1], state),
        ]
        for forward in forwards:
            with Elements() as counted:
                forward()
            counts.append(counted.count)
        return counts

    early, late = elements(500), elements(TOKENS - 100)
    more, layers = TOKENS - 600, len(state.attention_layers)
    mask = 2 * layers * more * 16  # of a verify: which row sees which key
    assert [b - a for a, b in zip(early, late, strict=True)] == [0, mask, 0]


def golden_run(model: Clover, **given: Any) -> tuple[Generator, EventStream]:
    """An answer of `TOKENS` tokens by the golden model."""
    config = model.config
    state = SequenceState(config, context=TOKENS + 1, device="cpu", dtype=torch.float32)
    settings = Settings(
        mask_token_id=config.mask_token_id,
        vocab_size=config.vocab_size,
        max_new_tokens=TOKENS,
        **given,
    )
    generator = Generator(model, state, settings)
    return generator, generator.run([1])


def test_the_golden_model_writes_4000_tokens_and_holds_few_objects_beside_keys_and_values(
    golden_model: Clover,
) -> None:
    generator, events = golden_run(golden_model, mode="ar")
    state, config = generator.state, golden_model.config
    held = []
    for _ in range(4):
        for _ in islice(events, TOKENS // 4):
            pass
        held.append(sys.getallocatedblocks())
    result = next(event for event in events if isinstance(event, Finished)).result
    assert len(result.tokens) == TOKENS and result.finish_reason == "length"
    assert list(state.committed.tokens) == [1, *result.token_ids[:-1]]
    assert held[-1] - held[0] < OBJECTS_A_TOKEN * TOKENS * 3 // 4
    row = 2 * config.num_key_value_heads * config.head_dim * 4
    assert state.nbytes.keys_values == len(state.attention_layers) * row * (TOKENS + 1)
    assert state.nbytes.checkpoints == state.nbytes.recurrent + state.nbytes.conv


def test_a_token_of_an_answer_takes_a_few_hundred_bytes(golden_model: Clover) -> None:
    _, events = golden_run(golden_model, threshold=0.0)  # a pass and a commit a block
    blocks, held = 0, list[int]()
    tracemalloc.start()
    for event in events:
        blocks += isinstance(event, BlockCommitted)
        if isinstance(event, BlockCommitted) and blocks in (25, 100):
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (held[1] - held[0]) / (75 * 32) < BYTES_A_TOKEN
