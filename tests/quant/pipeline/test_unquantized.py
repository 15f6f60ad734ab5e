"""The source's rows through a layer: its own hidden states, in files."""

from pathlib import Path

import torch

from clover_local.quant import stream
from clover_local.quant.calibration import CalibrationSequence, PreviewBlock
from clover_local.quant.pipeline.rows import RowFile
from clover_local.quant.pipeline.source import PlainSource
from clover_local.quant.pipeline.unquantized import SourceLayer

SEQUENCES = (
    CalibrationSequence(
        tuple(range(5, 45)), (PreviewBlock(32, (37, 510, 510), (1, 2), text_rows=3, ratio=0.6),)
    ),
    CalibrationSequence((9, 8, 7), ()),
)


def test_rows_behind_are_those_of_the_source_layer(
    golden_source: PlainSource, tmp_path: Path
) -> None:
    config, layer = golden_source.config, 2
    names = ("rows", "mixed", "inputs", "behind")
    files = {name: RowFile(tmp_path / f"{name}.rows", config.hidden_size) for name in names}
    before = torch.randn(46, config.hidden_size, generator=torch.Generator().manual_seed(1))
    with files["rows"].writer(durable=False) as writer:
        writer.append(before)
    source_layer = SourceLayer(
        golden_source,
        layer,
        rows=files["rows"],
        mixed=files["mixed"],
        inputs=files["inputs"],
        device="cpu",
    )
    shares: list[float] = []
    source_layer.run(SEQUENCES, files["behind"], on_progress=shares.append)
    assert shares == [43 / 46, 1.0]
    built = stream.build_layer(
        config,
        golden_source.layer(layer),
        layer=layer,
        experts=stream.LayerExperts(golden_source.experts(layer, range(config.num_experts))),
    )
    for sequence, start, end in ((SEQUENCES[0], 0, 43), (SEQUENCES[1], 43, 46)):
        rows = stream.Rows.split(before[start:end], sequence)
        mixed = stream.mix(built, rows, sequence)
        torch.testing.assert_close(files["mixed"].read(start, end), mixed.joined)
        inputs = stream.moe_inputs(built, mixed, sequence)
        torch.testing.assert_close(files["inputs"].read(start, end), inputs.x)
        behind = stream.run_layer(built, rows, sequence).joined
        torch.testing.assert_close(files["behind"].read(start, end), behind)


def test_last_layer_leaves_nothing_behind(golden_source: PlainSource, tmp_path: Path) -> None:
    width = golden_source.config.hidden_size
    names = ("rows", "mixed", "inputs")
    rows, mixed, inputs = (RowFile(tmp_path / name, width) for name in names)
    with rows.writer(durable=False) as writer:
        writer.append(torch.randn(46, width))
    SourceLayer(golden_source, 3, rows=rows, mixed=mixed, inputs=inputs, device="cpu").run(
        SEQUENCES, None
    )
    assert {path.name for path in tmp_path.iterdir()} == set(names)
