"""Sums of squares of what every matrix is multiplied with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clover_local.checkpoint.read import read_experts, read_layer, read_outer
from clover_local.gguf.imatrix import Sums
from clover_local.gguf.tensors import named_entries
from clover_local.kernels import dispatch
from clover_local.kernels.packed import Weight
from clover_local.model.clover import Layer
from clover_local.quant import stream
from clover_local.quant.calibration import CalibrationSequence, PreviewBlock
from clover_local.quant.imatrix import collect, unseen_experts
from clover_local.session import OpenModel, open_model

SEQUENCES = (
    CalibrationSequence(
        tokens=tuple(range(3, 40)),
        previews=(
            PreviewBlock(4, (510, 8, 510, 510, 9, 510, 510, 12), (0, 2, 3, 5, 6), 8, 0.5),
            PreviewBlock(12, (15, 510, 510, 18, 19, 510, 21, 22), (1, 2, 5), 8, 0.4),
        ),
    ),
    CalibrationSequence(tokens=tuple(range(200, 260)), previews=()),
)
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def opened(golden_folder: Path) -> OpenModel:
    return open_model(str(golden_folder))


@pytest.fixture(scope="module")
def sums(opened: OpenModel) -> dict[str, Sums]:
    return collect(opened, SEQUENCES)


def hidden_states(opened: OpenModel, layers: int) -> list[stream.Rows]:
    """The rows behind `layers` layers, by the stream that quantizing uses."""
    embedding = read_outer(opened.checkpoint, opened.config)["embed_tokens.weight"]
    assert isinstance(embedding, torch.Tensor)
    rows = [stream.embed(sequence, embedding.float()) for sequence in SEQUENCES]
    for number in range(layers):
        layer = built(opened, number)
        pairs = zip(SEQUENCES, rows, strict=True)
        rows = [stream.run_layer(layer, each, sequence) for sequence, each in pairs]
    return rows


def built(opened: OpenModel, layer: int, **other: Weight) -> Layer:
    config = opened.config
    experts = read_experts(opened.checkpoint, config, layer, range(config.num_experts))
    return stream.build_layer(
        config,
        {**read_layer(opened.checkpoint, config, layer), **other},
        layer=layer,
        experts=stream.LayerExperts(zip(*experts, strict=True)),
    )


def squares(parts: list[torch.Tensor]) -> Floats:
    found: Floats = torch.cat(parts).double().square().sum(0).float().numpy()
    return found


def test_every_quantized_tensor_but_the_embedding_has_sums(
    opened: OpenModel, sums: dict[str, Sums]
) -> None:
    entries = {each.name: each for each in named_entries(opened.config)}
    wanted = {name for name, each in entries.items() if not each.entry.float32}
    assert sums.keys() == wanted - {"token_embd.weight"}
    for name, each in sums.items():
        shape = entries[name].shape
        matrices = shape[0] if entries[name].entry.of_experts else 1
        assert each.squares.shape == (matrices, shape[-1])
        assert np.isfinite(each.squares).all()
        assert each.importance.min() >= 0


def test_the_last_layers_rows_are_those_of_a_plain_run(
    opened: OpenModel, sums: dict[str, Sums]
) -> None:
    rows = hidden_states(opened, opened.config.num_hidden_layers)
    norm = read_outer(opened.checkpoint, opened.config)["norm.weight"]
    assert isinstance(norm, torch.Tensor)
    eps = opened.config.rms_norm_eps
    expected = squares([dispatch.rms_norm(each.joined, norm.float(), eps=eps) for each in rows])
    assert np.allclose(sums["output.weight"].squares[0], expected, rtol=1e-4)
    assert sums["output.weight"].counts.tolist() == [37 + 60 + 16]


def test_inputs_of_mixers_are_the_normed_rows(opened: OpenModel, sums: dict[str, Sums]) -> None:
    rows = hidden_states(opened, 3)
    layer = built(opened, 3)
    pairs = zip(SEQUENCES, rows, strict=True)
    expected = squares([stream.normed(layer, each, sequence).joined for sequence, each in pairs])
    for name in ("attn_q", "attn_k", "attn_v"):
        assert np.allclose(sums[f"blk.3.{name}.weight"].squares[0], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("layer", "name", "parameter", "heads"),
    [
        (3, "attn_output", "self_attn.o_proj", [0, 1, 2, 3]),
        (1, "ssm_out", "linear_attn.out_proj", [0, 2, 1, 3]),  # value heads as in the file
    ],
)
def test_columns_of_last_matrices_are_in_the_files_order(
    layer: int,
    name: str,
    parameter: str,
    heads: list[int],
    opened: OpenModel,
    sums: dict[str, Sums],
) -> None:
    whole = f"layers.{layer}.{parameter}.weight"
    one = built(opened, layer, **{whole: torch.eye(128)})
    inner = []
    for sequence, each in zip(SEQUENCES, hidden_states(opened, layer), strict=True):
        inner.append(stream.mixer_output(one, stream.normed(one, each, sequence), sequence))
    expected = squares(inner).reshape(4, 32)[heads].ravel()
    assert np.allclose(sums[f"blk.{layer}.{name}.weight"].squares[0], expected, rtol=1e-4)


def test_each_expert_has_the_rows_that_were_routed_to_it(
    opened: OpenModel, sums: dict[str, Sums]
) -> None:
    layer = built(opened, 0)
    x, ids = [], []
    for sequence, each in zip(SEQUENCES, hidden_states(opened, 0), strict=True):
        inputs = stream.moe_inputs(layer, stream.mix(layer, each, sequence), sequence)
        x.append(inputs.x)
        ids.append(inputs.routing.expert_ids)
    rows, chosen = torch.cat(x), torch.cat(ids)
    for expert in range(opened.config.num_experts):
        here = rows[(chosen == expert).any(1)]
        for half in ("gate", "up"):
            found = sums[f"blk.0.ffn_{half}_exps.weight"]
            assert found.counts[expert] == len(here)
            assert np.allclose(found.squares[expert], squares([here]), rtol=1e-4)
        assert sums["blk.0.ffn_down_exps.weight"].counts[expert] == len(here)
    assert np.allclose(sums["blk.0.ffn_up_shexp.weight"].squares[0], squares([rows]), rtol=1e-4)


def test_previews_count_by_their_weight(opened: OpenModel) -> None:
    without = collect(opened, [sequence.without_previews() for sequence in SEQUENCES])
    weightless = collect(opened, SEQUENCES, preview_weight=0.0)
    for name, each in without.items():
        assert np.allclose(weightless[name].squares, each.squares, rtol=1e-4)
        assert np.array_equal(weightless[name].counts, each.counts)
    doubled = collect(opened, SEQUENCES, preview_weight=2.0)
    assert doubled["output.weight"].counts.tolist() == [37 + 60 + 2 * 16]


def test_experts_that_saw_nothing_are_counted_and_get_ones(opened: OpenModel) -> None:
    few = collect(opened, [CalibrationSequence(tokens=(5,), previews=())])
    assert unseen_experts(few) == 4 * (8 - 2)
    importance = few["blk.0.ffn_down_exps.weight"].importance
    unseen = few["blk.0.ffn_down_exps.weight"].counts == 0
    assert (importance[unseen] == 1).all()


def test_a_quantized_model_and_a_gguf_file_give_sums_too(
    quantized_folder: Path, opened: OpenModel, sums: dict[str, Sums]
) -> None:
    found = collect(open_model(str(quantized_folder)), SEQUENCES)
    assert found.keys() == sums.keys()
    a, b = (each["blk.0.attn_qkv.weight"].squares for each in (found, sums))
    assert np.allclose(a, b, rtol=1e-3)  # the embedding's rows are the same
    other = replace(opened, name="other")
    assert collect(other, SEQUENCES[1:]).keys() == sums.keys()
