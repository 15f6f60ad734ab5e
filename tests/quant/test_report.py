"""Reports: to JSON and back, as a table, as a line."""

import json
from dataclasses import replace

import pytest

from clover_local.errors import ConfigError
from clover_local.quant.pipeline.manifest import MADE_FROM, Manifest
from clover_local.quant.report import (
    DampedExpert,
    ExpertReport,
    LayerReport,
    QuantizationReport,
    SizeReport,
    TensorReport,
    layer_line,
    parse_layer,
    spread,
    table,
)

GPTQ, RTN = spread([0.01, 0.02, 0.06]), spread([0.03, 0.04, 0.08])
LAYER = LayerReport(
    layer=3,
    tensors=(TensorReport("layers.3.self_attn.q_proj.weight", 8, 64, 1e-5),),
    experts=(
        ExpertReport("gate_proj", 4, 128, RTN, GPTQ, 2),
        ExpertReport("down_proj", 8, 128, RTN, RTN, 0),
    ),
    tokens=(70, 4, 90),
    few_tokens=(1,),
    damped=(DampedExpert("gate_proj", 1, 0.1),),
    dead_inputs=7,
)
IMPORTED = LayerReport(0, (), (ExpertReport("gate_proj", 4, 32),), (), (), (), 0)


def test_spread() -> None:
    assert (GPTQ.median, GPTQ.largest) == (0.02, 0.06)
    assert GPTQ.mean == pytest.approx(0.03)


@pytest.mark.parametrize("layer", [LAYER, IMPORTED], ids=["quantized", "imported"])
def test_layer_is_read_back_equal(layer: LayerReport) -> None:
    assert parse_layer(json.loads(json.dumps(layer.to_json())), "a file") == layer


@pytest.mark.parametrize(
    ("key", "value"), [("tokens", 3), ("experts", [1]), ("layer", None), ("damped", "x")]
)
def test_damaged_layer_is_an_error_that_names_the_file(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match="a file.*" + key):
        parse_layer({**json.loads(json.dumps(LAYER.to_json())), key: value}, "a file")


def test_line_of_a_layer() -> None:
    assert layer_line(LAYER, layers=8) == (
        "layer 4 of 8 · tokens an expert 4 to 90 · gate_proj INT4 error 2.00 % (RTN 4.00 %) · "
        "down_proj INT8 error 4.00 %"
    )
    assert layer_line(IMPORTED, layers=8) == "layer 1 of 8 · gate_proj INT4"


def test_report_holds_its_manifest_and_counts_experts_with_few_tokens() -> None:
    report = QuantizationReport(
        manifest=Manifest(source={}, arguments={}, calibration=""),
        size=SizeReport(10, 40, 4.2, 8, 0.26),
        outer=(),
        layers=(LAYER, replace(LAYER, layer=4)),
        evaluation=None,
        notes=("a note",),
    )
    values = report.to_json()
    assert values[MADE_FROM] == report.manifest.to_json()
    assert values["experts_under_min_tokens"] == 2
    assert values["layers"][0]["tokens_median"] == 70
    head, gate, down, *_ = table(values)
    assert head[0] == "layer"
    assert gate == ("3", "4", "70", "1", "gate_proj", "4", "128", "2.00 %", "4.00 %", "6.00 % (2)")
    assert down[:5] == ("", "", "", "", "down_proj")


def test_table_of_an_import_has_no_errors() -> None:
    row = table({"layers": [IMPORTED.to_json()]})[1]
    assert row == ("0", "-", "-", "0", "gate_proj", "4", "32", "-", "-", "-")
