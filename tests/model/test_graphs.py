"""Passes at fixed places, as graphs have them: rounds of verify and accept among other passes.

There is no GPU here. A double stands for `Replay`: like a graph it runs the function that it was
made with, whatever came since, and then overwrites what earlier forwards gave, as graphs do that
share their memory. What is not seen so: that a card can capture these functions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from clover_local.cache import SequenceState, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.settings import resolve
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.gated_delta_commit import LayeredRecord
from clover_local.kernels.gpu.replay import Replay
from clover_local.model import graphs
from clover_local.model.clover import Clover
from clover_local.model.graphs import GraphedClover
from clover_local.model.output import PassOutput
from clover_local.placement import MemoryOptions
from clover_local.session import load, open_model

EmptyState = Callable[[ModelConfig], SequenceState]
RandomModel = Callable[[ModelConfig], Clover]

PROMPT = [(7 * i + 3) % 90 for i in range(19)]
TOKENS = [(11 * i + 5) % 90 for i in range(64)]


class SharedMemory:
    """What graphs of one pool gave: nothing of it outlives the next forward."""

    def __init__(self) -> None:
        self.fails_at: int | None = None
        self.runs = 0
        self._given: list[Tensor] = []

    def replay(self, function: Callable[[], Any], **_: object) -> Replay[Any]:
        """As the class of that name."""
        memory = self

        class Double(Replay[Any]):
            def __call__(self) -> Any:
                memory.runs += 1
                if memory.fails_at == memory.runs:
                    raise torch.OutOfMemoryError("no room for a graph")
                for x in memory._given:
                    x.fill_(-1 if x.dtype == torch.int64 else torch.nan)
                result = function()
                output = result if isinstance(result, PassOutput) else result[0]
                memory._given = [output.logits, *output.expert_ids]
                return result

        return Double(function, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    memory = SharedMemory()
    monkeypatch.setattr(graphs, "Replay", memory.replay)
    monkeypatch.setattr(ResidentExperts, "waits_because", None)  # plain ones would need no graph
    return memory


@pytest.fixture(scope="module", params=["golden", "odd", "offloaded"])
def model(
    request: pytest.FixtureRequest,
    golden_model: Clover,
    golden_folder: Path,
    odd_config: ModelConfig,
    random_model: RandomModel,
) -> Clover:
    """Two shapes, and the first one with so few slots that forwards are cut at their experts."""
    if request.param == "offloaded":
        opened = open_model(str(golden_folder))
        settings = resolve(opened.config, opened.generation, {}).settings
        memory = MemoryOptions(expert_slots=9)
        return load(opened, settings, context=900, device="cpu", memory=memory).model
    return golden_model if request.param == "golden" else random_model(odd_config)


def contents(state: SequenceState) -> list[Tensor]:
    """Copies of everything a state holds."""
    tensors = [*state.committed.recurrent, *state.committed.conv]
    for layer in state.attention_layers:
        tensors += state.keys_values(layer)
    return [torch.tensor(state.committed.tokens), *(x.clone() for x in tensors)]


class Pair:
    """One sequence by graphs and one without, which do the same and have to stay the same."""

    def __init__(self, model: Clover, first_rows: int = 256) -> None:
        self.model = model
        self.graphed = GraphedClover(model, on_fallback=lambda line: pytest.fail(line))
        self.ours, self.theirs = (
            SequenceState(
                model.config,
                context=900,
                device="cpu",
                dtype=torch.float32,
                first_rows=first_rows,
            )
            for _ in range(2)
        )
        self.commit(PROMPT)

    def commit(self, tokens: list[int]) -> None:
        got = self.graphed.commit(tokens, self.ours).logits
        assert torch.equal(got, self.model.commit(tokens, self.theirs).logits)
        self.check()

    def preview(self, rows: int) -> None:
        block = [TOKENS[0], *[self.model.config.mask_token_id] * (rows - 1)]
        before = contents(self.ours)
        got = self.graphed.preview(block, self.ours).logits
        assert torch.equal(got, self.model.preview(block, self.theirs).logits)
        assert all(map(torch.equal, contents(self.ours), before))

    def verify(self, rows: int) -> tuple[VerifyRecord, VerifyRecord]:
        start = self.ours.length % 7
        tokens, before = TOKENS[start : start + rows], contents(self.ours)
        got, expected = (
            self.graphed.verify(tokens, self.ours),
            self.model.verify(tokens, self.theirs),
        )
        assert torch.equal(got.logits, expected.logits)
        assert all(map(torch.equal, got.expert_ids, expected.expert_ids))
        assert all(map(torch.equal, contents(self.ours), before))
        return got.record, expected.record

    def accept(self, records: tuple[VerifyRecord, VerifyRecord], rows: int) -> None:
        self.graphed.accept(records[0], rows, self.ours)
        self.model.accept(records[1], rows, self.theirs)
        self.check()

    def check(self) -> None:
        assert all(map(torch.equal, contents(self.ours), contents(self.theirs)))


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_rounds_of_any_width_keep_any_number_of_rows(width: int, model: Clover) -> None:
    pair = Pair(model)
    for rows in sorted({1, 2, width // 2, width - 1, width} - {0, -1}):
        if rows <= width:
            pair.preview(width)
            pair.accept(pair.verify(width), rows)
    pair.commit([4])


def test_widths_of_one_run_may_rise_and_fall(model: Clover) -> None:
    pair = Pair(model)
    for width, rows in ((4, 2), (16, 16), (4, 4), (1, 1), (32, 7), (2, 1), (16, 3)):
        pair.accept(pair.verify(width), rows)
    pair.preview(16)


def test_previews_between_a_verify_and_its_accept_change_nothing(model: Clover) -> None:
    """They use the memory of all other graphs, but not that of the record."""
    pair = Pair(model)
    for rows in (3, 8, 1):
        records = pair.verify(8)
        pair.preview(8)
        pair.preview(32)
        pair.accept(records, rows)


def test_rows_that_are_not_accepted_leave_nothing_behind(model: Clover) -> None:
    pair = Pair(model)
    for _ in range(3):
        pair.verify(16)
        pair.preview(16)
        pair.verify(16)
        pair.commit([7, 8])
        pair.accept(pair.verify(4), 2)


def test_modes_may_change_at_any_boundary(model: Clover) -> None:
    pair = Pair(model)
    for _ in range(2):
        pair.accept(pair.verify(8), 5)
        pair.commit([9])  # ar
        pair.preview(32)  # denoise
        pair.commit(TOKENS[:32])
        pair.commit(TOKENS[:1])
        pair.accept(pair.verify(8), 8)


def test_keys_and_values_may_grow_between_any_two_forwards(model: Clover) -> None:
    pair = Pair(model, first_rows=21)
    for rows in (2, 16, 9, 1, 16):
        before = len(pair.ours.view().keys_values[pair.ours.attention_layers[0]].keys)
        pair.preview(16)
        records = pair.verify(16)
        pair.preview(16)
        pair.accept(records, rows)
    assert before > 21


def test_a_checkpoint_may_be_restored_between_rounds(model: Clover) -> None:
    pair = Pair(model)
    pair.accept(pair.verify(8), 4)
    points = [state.checkpoint() for state in (pair.ours, pair.theirs)]
    pair.accept(pair.verify(8), 8)
    for state, point in zip((pair.ours, pair.theirs), points, strict=True):
        state.rewind(point)
    pair.check()
    pair.accept(pair.verify(8), 3)
    pair.preview(8)


def test_slots_may_become_fewer_between_a_verify_and_its_accept(model: Clover) -> None:
    pair = Pair(model)
    for _ in range(2):
        pair.preview(8)
        records = pair.verify(8)
        model.give_up_memory()
        pair.accept(records, 5)
        pair.commit([2])


def test_another_sequence_has_graphs_of_its_own(model: Clover) -> None:
    pair = Pair(model)
    pair.accept(pair.verify(8), 4)
    pair.ours, pair.theirs = (
        SequenceState(model.config, context=950, device="cpu", dtype=torch.float32)
        for _ in range(2)
    )
    pair.accept(pair.verify(8), 4)
    pair.commit([5])


def test_no_room_for_a_graph_leaves_the_state_and_the_next_try_succeeds(
    model: Clover, memory: SharedMemory
) -> None:
    pair = Pair(model)
    for _ in range(3):
        before, committed = contents(pair.ours), pair.ours.committed
        memory.fails_at = memory.runs + 1
        with pytest.raises(torch.OutOfMemoryError):
            pair.graphed.verify(TOKENS[:16], pair.ours)
        assert all(map(torch.equal, contents(pair.ours), before))
        assert pair.ours.length == len(committed.tokens)
        pair.preview(16)
        pair.accept(pair.verify(16), 11)


def test_no_room_for_a_record_leaves_the_state_and_the_next_try_succeeds(
    model: Clover, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room for a record")

    pair = Pair(model)
    pair.accept(pair.verify(2), 1)
    before = contents(pair.ours)
    with monkeypatch.context() as patch:
        patch.setattr(LayeredRecord, "empty", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            pair.graphed.verify(TOKENS[:16], pair.ours)
    assert all(map(torch.equal, contents(pair.ours), before))
    pair.accept(pair.verify(16), 9)
    pair.accept(pair.verify(2), 2)


def test_more_rows_than_graphs_have_are_verified_without_one(
    model: Clover, memory: SharedMemory
) -> None:
    pair = Pair(model)
    runs = memory.runs
    tokens = [*TOKENS, 1]
    records = tuple(
        of.verify(tokens, state).record
        for of, state in ((pair.graphed, pair.ours), (model, pair.theirs))
    )
    assert memory.runs == runs
    pair.accept((records[0], records[1]), 40)
    pair.accept(pair.verify(8), 2)


def test_a_record_that_was_overwritten_is_refused(model: Clover) -> None:
    pair = Pair(model)
    old = pair.verify(8)[0]
    new = pair.verify(8)
    with pytest.raises(ValueError, match="another verify or commit has run since"):
        pair.graphed.accept(old, 3, pair.ours)
    pair.accept(new, 3)
    with pytest.raises(ValueError, match="verified behind 19 tokens; the state, of 22"):
        pair.graphed.accept(new[0], 3, pair.ours)


def test_a_record_is_refused_where_a_commit_has_failed_behind_it(
    model: Clover, memory: SharedMemory
) -> None:
    """Its keys and values may have been overwritten by then."""
    pair = Pair(model)
    record = pair.verify(8)[0]
    memory.fails_at = memory.runs + 1
    with pytest.raises(torch.OutOfMemoryError):
        pair.graphed.commit([3], pair.ours)
    with pytest.raises(ValueError, match="another verify or commit has run since"):
        pair.graphed.accept(record, 3, pair.ours)
    pair.accept(pair.verify(8), 3)


@pytest.mark.parametrize("rows", [0, 9])
def test_rows_that_were_not_verified_are_refused(rows: int, model: Clover) -> None:
    pair = Pair(model)
    records = pair.verify(8)
    with pytest.raises(ValueError, match=f"{rows} rows to accept of 8"):
        pair.graphed.accept(records[0], rows, pair.ours)
    pair.accept(records, 8)


def test_a_record_lies_where_no_graph_keeps_its_results(model: Clover) -> None:
    """At the same place for every verify of one width, of whichever set of states."""
    pair = Pair(model)
    places = set()
    for _ in range(4):
        records = pair.verify(8)
        leaves = [each.mixed for each in records[0].delta]
        places.add(tuple(x.data_ptr() for x in tree_leaves(leaves)))
        pair.accept(records, 8)
    assert len(places) == 1
