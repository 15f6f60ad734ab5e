"""Importing: what others have quantized arrives bit for bit, by the same restartable run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.errors import CheckpointError
from clover_local.quant.pipeline.run import Listener, Outcome, import_quantized
from clover_local.quant.pipeline.source import ForeignSource, open_source
from clover_local.session import open_model

QuantizeGolden = Callable[..., Outcome]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def foreign(quantize_golden: QuantizeGolden, tmp_path: Path) -> ForeignSource:
    """A pack-quantized checkpoint in one file that does not say who made it."""
    made = quantize_golden("made").folder
    folder = tmp_path / "foreign"
    folder.mkdir()
    save_file(tensors_in(made), folder / "model.safetensors")
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (folder / name).write_bytes((made / name).read_bytes())
    source = open_source(str(folder))
    assert isinstance(source, ForeignSource)
    return source


def test_every_tensor_arrives_bit_for_bit(foreign: ForeignSource, tmp_path: Path) -> None:
    outcome = import_quantized(foreign, tmp_path / "result")
    before, after = tensors_in(foreign.folder), tensors_in(outcome.folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    assert open_model(str(outcome.folder)).config.quant_method == "compressed-tensors"
    report = outcome.report
    assert report["made_from"]["arguments"] == {"method": "import of compressed-tensors"}
    assert report["evaluation"] is None
    for layer in report["layers"]:
        formats = [(each["kind"], each["bits"], each["method"]) for each in layer["experts"]]
        assert formats == [
            ("gate_proj", 4, None),
            ("up_proj", 4, None),
            ("down_proj", 4, None),
        ]
        assert {tensor["bits"] for tensor in layer["tensors"]} == {8}


def test_import_goes_on_after_a_stop(foreign: ForeignSource, tmp_path: Path) -> None:
    def stop(report: object) -> None:
        raise KeyboardInterrupt

    whole = import_quantized(foreign, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        import_quantized(foreign, tmp_path / "result", listener=Listener(on_layer=stop))
    outcome = import_quantized(foreign, tmp_path / "result")
    assert not outcome.was_finished
    for path in whole.folder.iterdir():
        assert path.read_bytes() == (outcome.folder / path.name).read_bytes()
    assert import_quantized(foreign, tmp_path / "result").was_finished


def test_scale_that_is_no_number_is_named(foreign: ForeignSource, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight_scale"
    tensors = load_file(foreign.folder / "model.safetensors")
    tensors[name][0, 0] = float("nan")
    save_file(tensors, foreign.folder / "model.safetensors")
    source = open_source(str(foreign.folder))
    assert isinstance(source, ForeignSource)
    with pytest.raises(CheckpointError, match=f": {re.escape(name)} holds NaN or infinity"):
        import_quantized(source, tmp_path / "result")


def test_own_result_is_refused_as_a_source(quantize_golden: QuantizeGolden) -> None:
    made = quantize_golden("made").folder
    with pytest.raises(CheckpointError, match="is already quantized: pass the unquantized"):
        open_source(str(made))
