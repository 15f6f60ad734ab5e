"""The whole model on Triton's kernels: golden numbers, and packed weights beside plain PyTorch.

Where there is no GPU the kernels run in the interpreter, on the CPU. Plain weights of the golden
checkpoint go through all kernels but those of packed weights; the quantized one has those.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import ModelConfig, read_model_config
from clover_local.decoding.settings import resolve
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.choice import VARIABLE
from clover_local.model.clover import Clover
from clover_local.model.graphs import GraphedClover
from clover_local.placement import MemoryOptions
from clover_local.session import load, open_model

Expected = Mapping[str, Tensor]
Cases = Mapping[str, Any]


def model_of(folder: Path, *, device: str) -> Clover:
    config = read_model_config(folder)
    loaded = load_parameters(open_checkpoint(folder, config), config, device=device)
    experts = ResidentExperts(loaded.experts)
    return Clover(config, loaded.parameters, experts=experts, device=device, dtype=torch.float32)


def empty(config: ModelConfig, *, device: str) -> SequenceState:
    return SequenceState(config, context=500, device=device, dtype=torch.float32)


def snapshot(state: SequenceState) -> list[Tensor]:
    """Copies of everything a state holds."""
    tensors = [*state.committed.recurrent, *state.committed.conv]
    for layer in state.attention_layers:
        tensors += state.keys_values(layer)
    return [torch.tensor(state.committed.tokens), *(x.clone() for x in tensors)]


def same_bits(state: SequenceState, before: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(snapshot(state), before, strict=True))


@pytest.fixture
def golden(golden_folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Clover:
    monkeypatch.setenv(VARIABLE, "triton")
    return model_of(golden_folder, device=device)


@pytest.fixture
def quantized(quantized_folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Clover:
    monkeypatch.setenv(VARIABLE, "triton")
    return model_of(quantized_folder, device=device)


@pytest.fixture
def reference(quantized_folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Clover:
    """To be used with the variable at `reference`."""
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "reference")
        return model_of(quantized_folder, device=device)


def assert_golden(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_memory_that_nothing_was_written_to_is_nan(dtype: torch.dtype, device: str) -> None:
    """What a kernel leaves out of its output shows in every comparison of these tests."""
    x = torch.empty(3, 5, dtype=dtype, device=device)
    for made in (x, torch.empty_like(x), x.new_empty(7)):
        assert made.isnan().all()


@pytest.mark.slow
def test_golden_prompt_preview_and_commit(
    golden: Clover, golden_cases: Cases, golden_expected: Expected, device: str
) -> None:
    state = empty(golden.config, device=device)
    out = golden.commit(golden_cases["prompt"], state, logits="all")
    assert_golden(out.logits, golden_expected["prompt_logits"])
    for layer in range(3):
        recurrent, conv = state.committed.recurrent[layer], state.committed.conv[layer]
        assert_golden(recurrent, golden_expected[f"state.{layer}.recurrent"])
        assert_golden(conv, golden_expected[f"state.{layer}.conv"])
    keys, values = state.keys_values(3)
    assert_golden(keys, golden_expected["state.3.k"])
    assert_golden(values, golden_expected["state.3.v"])

    before = snapshot(state)
    masked = golden.preview([golden.config.mask_token_id] * 32, state)
    assert_golden(masked.logits, golden_expected["preview_all_masked"])
    assert [x.tolist() for x in masked.coresets] == golden_cases["coreset_all_masked"]
    partial = golden.preview(golden_cases["partial_block"], state)
    assert_golden(partial.logits, golden_expected["preview_partial"])
    assert [x.tolist() for x in partial.coresets] == golden_cases["coreset_partial"]
    assert same_bits(state, before)

    out = golden.commit(golden_cases["commit_block"], state, logits="all")
    assert_golden(out.logits, golden_expected["commit_logits"])


def test_preview_over_an_empty_prefix(
    golden: Clover, golden_expected: Expected, device: str
) -> None:
    state = empty(golden.config, device=device)
    out = golden.preview([golden.config.mask_token_id] * 32, state)
    assert_golden(out.logits, golden_expected["preview_empty_prefix"])


@pytest.mark.parametrize("rows", [1, 7, 70])
def test_packed_model_is_that_of_plain_pytorch(
    rows: int,
    quantized: Clover,
    reference: Clover,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = quantized.config
    tokens = torch.randint(config.vocab_size, (rows + 3,), generator=torch.manual_seed(rows))
    outputs = []
    for name, model in (("triton", quantized), ("reference", reference)):
        monkeypatch.setenv(VARIABLE, name)
        state = empty(config, device=device)
        model.commit(tokens[:3], state)
        committed = model.commit(tokens[3:], state, logits="all")
        previewed = model.preview([config.mask_token_id] * min(rows, 7), state)
        outputs.append((committed, previewed, snapshot(state)))
    (ours, our_block, our_state), (theirs, their_block, their_state) = outputs
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(our_block.logits, their_block.logits, rtol=1e-4, atol=1e-4)
    for a, b in zip(our_state, their_state, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(our_block.expert_ids, their_block.expert_ids, strict=True):
        assert torch.equal(a, b)


def test_passes_of_fixed_buffers_are_those_of_the_model(quantized: Clover, device: str) -> None:
    config, said = quantized.config, list[str]()
    graphed = GraphedClover(quantized, on_fallback=said.append)
    one, other = (empty(config, device=device) for _ in range(2))
    generator = torch.manual_seed(5)
    # Where there are graphs, the second run is captured and the third replayed; the interpreter
    # takes a second for a pass.
    runs, sizes = (1, (5, 1, 1)) if device == "cpu" else (3, (32, 1, 1, 5))
    for _ in range(runs):
        for rows in sizes:
            tokens = torch.randint(config.vocab_size, (rows,), generator=generator).tolist()
            before = snapshot(one)
            block = [config.mask_token_id] * min(rows + 1, 32)
            assert torch.equal(
                graphed.preview(block, one).logits, quantized.preview(block, other).logits
            )
            assert same_bits(one, before)
            ours = graphed.commit(tokens, one, logits="last").logits.clone()
            assert torch.equal(ours, quantized.commit(tokens, other, logits="last").logits)
            assert same_bits(one, snapshot(other))
    assert said == []


@pytest.mark.slow
def test_accepted_rows_of_a_verify_are_their_commit_in_fixed_buffers_too(
    quantized: Clover, device: str
) -> None:
    config = quantized.config
    graphed = GraphedClover(quantized, on_fallback=lambda line: None)
    ours, theirs = (empty(config, device=device) for _ in range(2))
    for rows, tokens in ((2, [8, 9, 10]), (1, [12])):
        graphed.preview([config.mask_token_id] * 2, ours)  # brings the state to its fixed place
        graphed.accept(graphed.verify(tokens, ours).record, rows, ours)
        quantized.commit(tokens[:rows], theirs)
        for a, b in zip(snapshot(ours), snapshot(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    got = graphed.commit([13], ours).logits
    expected = quantized.commit([13], theirs).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_fixed_buffers_follow_a_rewind_and_another_sequence(quantized: Clover, device: str) -> None:
    config = quantized.config
    graphed = GraphedClover(quantized, on_fallback=lambda line: None)
    state, expected = (empty(config, device=device) for _ in range(2))
    graphed.commit([5, 6, 7], state)
    point = state.checkpoint()
    kept = snapshot(state)
    for tokens in ([8, 9], [10]):
        graphed.commit(tokens, state)
    state.rewind(point)
    assert same_bits(state, kept)
    graphed.preview([config.mask_token_id] * 4, state)
    assert same_bits(state, kept)
    got = graphed.commit([8, 9], state).logits
    quantized.commit([5, 6, 7], expected)
    assert torch.equal(got, quantized.commit([8, 9], expected).logits)
    second = empty(config, device=device)
    assert torch.equal(
        graphed.commit([1, 2], second).logits,
        quantized.commit([1, 2], empty(config, device=device)).logits,
    )


@pytest.mark.slow
def test_passes_are_cut_where_experts_are_missing(
    quantized: Clover, quantized_folder: Path, device: str
) -> None:
    config, said = quantized.config, list[str]()
    opened = open_model(str(quantized_folder))
    settings = resolve(opened.config, opened.generation, {}).settings
    memory = MemoryOptions(expert_slots=9)
    session = load(opened, settings, context=500, device=device, dtype="float32", memory=memory)
    graphed = GraphedClover(session.model, on_fallback=said.append)
    state, expected = (empty(config, device=device) for _ in range(2))
    generator = torch.manual_seed(9)
    for _ in range(1 if device == "cpu" else 4):
        for rows in (5, 1):
            tokens = torch.randint(config.vocab_size, (rows,), generator=generator).tolist()
            block = [config.mask_token_id] * 3
            ours = graphed.preview(block, state).logits.clone()
            assert torch.equal(ours, quantized.preview(block, expected).logits)
            ours = graphed.commit(tokens, state).logits.clone()
            assert torch.equal(ours, quantized.commit(tokens, expected).logits)
            assert same_bits(state, snapshot(expected))
    assert said == []
    stats = session.model.experts.stats()
    assert stats is not None
    assert stats.counts["preview"].misses > 0
    assert stats.copied.records == stats.total.misses


def test_a_model_whose_experts_wait_for_the_host_runs_without_graphs_and_says_so_once(
    golden: Clover, device: str
) -> None:
    said: list[str] = []
    graphed = GraphedClover(golden, on_fallback=said.append)
    state = empty(golden.config, device=device)
    graphed.commit([5], state)
    graphed.preview([golden.config.mask_token_id] * 2, state)
    assert said == [
        "passes run without CUDA graphs: the experts of layer 0 are not packed, or not all in one "
        "format"
    ]
    assert graphed.runs_without_graphs_because is not None
