"""Layer by layer gives what the model gives: every commit row, every preview."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.read import ExpertWeights
from clover_local.config import ModelConfig
from clover_local.kernels.packed import Weight
from clover_local.model.clover import Clover
from clover_local.quant.calibration import CalibrationSequence, PreviewBlock
from clover_local.quant.stream import (
    LayerExperts,
    Rows,
    build_head,
    build_layer,
    embed,
    finish,
    mix,
    moe_inputs,
    run_layer,
)

EmptyState = Callable[[ModelConfig], SequenceState]
RandomModel = Callable[[ModelConfig], Clover]
RandomParameters = Callable[[ModelConfig], dict[str, Tensor]]


def some_sequence(
    config: ModelConfig, *, length: int, starts: dict[int, int]
) -> CalibrationSequence:
    """Random tokens, with a preview of `rows` rows at each of `starts`, every third one masked."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    previews = []
    for start, rows in starts.items():
        block = torch.randint(config.vocab_size, (rows,), generator=generator).tolist()
        block[::3] = [config.mask_token_id] * len(block[::3])
        previews.append(PreviewBlock(start, tuple(block), tuple(range(0, rows, 3)), rows, 0.3))
    return CalibrationSequence(tuple(tokens), tuple(previews))


def streamed(
    config: ModelConfig,
    parameters: Mapping[str, Weight],
    experts: list[ExpertWeights],
    sequence: CalibrationSequence,
) -> Rows:
    """The logits of a sequence, one layer after the other."""
    rows = embed(sequence, parameters["embed_tokens.weight"])
    for layer in range(config.num_hidden_layers):
        built = build_layer(
            config, parameters, layer=layer, experts=LayerExperts(zip(*experts[layer], strict=True))
        )
        rows = run_layer(built, rows, sequence)
    head = build_head(config, parameters)
    return Rows(head(rows.commit), head(rows.preview))


def from_the_model(model: Clover, state: SequenceState, sequence: CalibrationSequence) -> Rows:
    """The same from `Clover.commit` and `Clover.preview`."""
    committed, previewed = [], []
    for block in sequence.previews:
        piece = sequence.tokens[state.length : block.start]
        if piece:
            committed.append(model.commit(piece, state, logits="all").logits)
        previewed.append(model.preview(block.tokens, state).logits)
    committed.append(model.commit(sequence.tokens[state.length :], state, logits="all").logits)
    return Rows(torch.cat(committed), torch.cat(previewed))


@pytest.mark.parametrize(
    "starts",
    [{32: 32, 64: 32, 96: 13}, {0: 32, 1: 32, 40: 7}, {5: 16, 99: 10}],
    ids=["tiled", "from-nothing-and-overlapping", "short-blocks-off-the-grid"],
)
def test_golden_model_layer_by_layer(
    starts: dict[int, int], golden_folder: Path, golden_model: Clover, empty_state: EmptyState
) -> None:
    config = golden_model.config
    loaded = load_parameters(open_checkpoint(golden_folder, config), config)
    sequence = some_sequence(config, length=109, starts=starts)
    got = streamed(config, loaded.parameters, list(loaded.experts), sequence)
    expected = from_the_model(golden_model, empty_state(config), sequence)
    torch.testing.assert_close(got.commit, expected.commit, rtol=0, atol=2e-5)
    torch.testing.assert_close(got.preview, expected.preview, rtol=0, atol=2e-5)
    assert got.commit.shape == (109, config.vocab_size)
    assert len(got.preview) == sum(starts.values())


@pytest.mark.parametrize("coreset", [True, False], ids=["coreset", "no-coreset"])
def test_odd_model_layer_by_layer(
    coreset: bool,
    odd_config: ModelConfig,
    random_model: RandomModel,
    random_parameters: RandomParameters,
    empty_state: EmptyState,
) -> None:
    config = replace(odd_config, coreset_enabled=coreset, coreset_top_p=0.5)
    parameters = random_parameters(config)
    experts = [
        ExpertWeights(
            parameters[f"layers.{layer}.mlp.experts.gate_up_proj"],
            parameters[f"layers.{layer}.mlp.experts.down_proj"],
        )
        for layer in range(config.num_hidden_layers)
    ]
    sequence = some_sequence(config, length=50, starts={17: 32, 33: 17})
    got = streamed(config, parameters, experts, sequence)
    expected = from_the_model(random_model(config), empty_state(config), sequence)
    torch.testing.assert_close(got.commit, expected.commit, rtol=0, atol=2e-5)
    torch.testing.assert_close(got.preview, expected.preview, rtol=0, atol=2e-5)


def test_parts_of_a_layer_make_the_whole(golden_folder: Path, golden_config: ModelConfig) -> None:
    loaded = load_parameters(open_checkpoint(golden_folder, golden_config), golden_config)
    experts = LayerExperts(zip(*loaded.experts[1], strict=True))
    layer = build_layer(golden_config, loaded.parameters, layer=1, experts=experts)
    sequence = some_sequence(golden_config, length=41, starts={32: 9})
    rows = embed(sequence, loaded.parameters["embed_tokens.weight"])
    mixed = mix(layer, rows, sequence)
    inputs = moe_inputs(layer, mixed, sequence)
    assert inputs.x.shape == (50, golden_config.hidden_size)
    routed = experts.forward(1, inputs.x, routing=inputs.routing)
    whole = run_layer(layer, rows, sequence)
    assert torch.equal(finish(mixed, inputs, routed.sum()).joined, whole.joined)


def test_sequence_without_previews_runs_causally(
    golden_folder: Path, golden_model: Clover, empty_state: EmptyState
) -> None:
    config = golden_model.config
    loaded = load_parameters(open_checkpoint(golden_folder, config), config)
    sequence = some_sequence(config, length=37, starts={})
    got = streamed(config, loaded.parameters, list(loaded.experts), sequence)
    state = empty_state(config)
    expected = golden_model.commit(sequence.tokens, state, logits="all").logits
    torch.testing.assert_close(got.commit, expected, rtol=0, atol=2e-5)
    assert got.preview.shape == (0, config.vocab_size)


def test_layer_without_a_parameter_is_refused(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    loaded = load_parameters(open_checkpoint(golden_folder, golden_config), golden_config)
    del loaded.parameters["layers.2.linear_attn.A_log"]
    with pytest.raises(ValueError, match=r"parameter layers\.2\.linear_attn\.A_log is missing"):
        build_layer(
            golden_config,
            loaded.parameters,
            layer=2,
            experts=LayerExperts(zip(*loaded.experts[2], strict=True)),
        )
