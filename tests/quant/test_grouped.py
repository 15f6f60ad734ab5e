"""A layer by groups of experts, for some sequences at a time: the same rows as all at once."""

from pathlib import Path

import pytest
import torch

from clover_local.checkpoint.read import read_experts, read_layer, read_outer
from clover_local.kernels.packed import Weight
from clover_local.quant import grouped, stream
from clover_local.quant.calibration import CalibrationSequence, PreviewBlock
from clover_local.quant.grouped import GroupedExperts, Passed, places, through_layer
from clover_local.session import open_model

M = 510  # MASK of the golden model
SEQUENCES = (
    CalibrationSequence(
        tuple(range(5, 95)),
        (
            PreviewBlock(32, (37, M, M, 40), (1, 2), text_rows=4, ratio=0.5),
            PreviewBlock(64, (M, 70, M), (0, 2), text_rows=3, ratio=0.6),
        ),
    ),
    CalibrationSequence((9, 8, 7), ()),
    CalibrationSequence(tuple(range(300, 371)), ()),
)


@pytest.mark.parametrize(
    ("experts", "together", "at_once"),
    [(8, 10**6, 512), (3, 10**6, 512), (3, 1, 512), (8, 100, 7), (1, 100, 50)],
    ids=["all", "groups", "groups-one-sequence", "few-rows-at-once", "one-expert"],
)
def test_rows_are_those_of_the_whole_layer(
    golden_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    experts: int,
    together: int,
    at_once: int,
) -> None:
    golden = open_model(str(golden_folder))
    config, checkpoint, layer = golden.config, golden.checkpoint, 1
    expert_bytes = 4 * 3 * config.hidden_size * config.moe_intermediate_size
    monkeypatch.setattr(grouped, "GROUP_BYTES", experts * expert_bytes)
    monkeypatch.setattr(grouped, "ROWS_TOGETHER", together)
    monkeypatch.setattr(grouped, "ROWS_AT_ONCE", at_once)

    def read(expert: int) -> tuple[Weight, Weight]:
        one = read_experts(checkpoint, config, layer, [expert])
        return one.gate_up[0], one.down[0]

    parameters = read_layer(checkpoint, config, layer)
    by_groups, whole = (
        stream.build_layer(config, parameters, layer=layer, experts=each)
        for each in (
            GroupedExperts(config, read),
            stream.LayerExperts(read(expert) for expert in range(config.num_experts)),
        )
    )
    embedding = read_outer(checkpoint, config)["embed_tokens.weight"]
    assert isinstance(embedding, torch.Tensor)
    rows = [stream.embed(sequence, embedding.float()) for sequence in SEQUENCES]
    joined = torch.cat([each.joined for each in rows])
    passed = list(through_layer(by_groups, SEQUENCES, lambda place: joined[place]))
    assert [each.place for each in passed] == [place for _, place in places(SEQUENCES)]
    for own, before, sequence in zip(passed, rows, SEQUENCES, strict=True):
        check(own, stream.run_layer(whole, before, sequence), sequence)


def check(passed: Passed, expected: stream.Rows, sequence: CalibrationSequence) -> None:
    assert len(passed.mixed.joined) == len(passed.inputs.x) == sequence.rows
    torch.testing.assert_close(passed.behind.joined, expected.joined, rtol=1e-5, atol=1e-6)
