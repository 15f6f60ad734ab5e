"""Quantizing from .gguf files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clover_local.checkpoint.load import load_parameters
from clover_local.config import read_generation_config, read_model_config
from clover_local.gguf.export.ggml import find_ggml
from clover_local.gguf.export.mixtures import mixture
from clover_local.gguf.export.run import export_diffusion, export_gguf, make_plan
from clover_local.gguf.export.source import Source
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.quant.pipeline.run import import_quantized, quantize
from clover_local.quant.pipeline.source import GgufSource, PlainSource, open_source
from clover_local.session import open_model
from tests.quant.pipeline.conftest import MEMORY, QUIET, TEXT, MakeRecipe

Export = Callable[..., Path]


@pytest.fixture
def export(golden_folder: Path, tmp_path: Path) -> Export:
    """Exports the golden model."""

    def run(file_type: str, *, diffusion: str = "embed") -> Path:
        opened = open_model(str(golden_folder))
        source = Source(
            "golden", opened.checkpoint, opened.config, opened.generation, opened.tokenizer
        )
        plan = make_plan(
            source,
            mixture(file_type, None, has_imatrix=False),
            architecture="qwen35moe",
            diffusion=diffusion,
        )
        path = tmp_path / "file" / "golden.gguf"
        path.parent.mkdir()
        export_gguf(source, path, plan, diffusion="none", jobs=1)
        if diffusion == "none":
            export_diffusion(source, path.with_name("golden.diffusion.gguf"))
        return path

    return run


def quantized(source: str, destination: Path, text: Path, make_recipe: MakeRecipe) -> Path:
    opened = open_source(source)
    assert isinstance(opened, PlainSource)
    recipe = make_recipe(method="rtn")
    quantize(opened, destination, recipe=recipe, calibration=text, memory=MEMORY, listener=QUIET)
    return destination


@pytest.mark.parametrize("diffusion", ["embed", "none"], ids=["embedded", "sidecar"])
def test_an_unquantized_file_gives_the_checkpoint_that_its_source_gives(
    diffusion: str, golden_folder: Path, export: Export, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    from_file = quantized(
        str(export("F32", diffusion=diffusion)), tmp_path / "a", text, make_recipe
    )
    from_folder = quantized(str(golden_folder), tmp_path / "b", text, make_recipe)
    for path in sorted(from_folder.glob("*.safetensors")):
        ours, theirs = load_file(from_file / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            if tensor.dtype == torch.int32:
                assert torch.equal(ours[name], tensor), name
            else:
                found = ours[name].float().view(tensor.shape)
                assert torch.allclose(found, tensor.float(), rtol=1e-2, atol=1e-6), name
    config = read_model_config(from_file)
    assert read_generation_config(from_file, config).stop_ids == (506, 507)
    opened = open_model(str(from_file))
    assert opened.checkpoint.has_diffusion
    assert opened.config.threshold == 0.95
    assert opened.tokenizer.encode("Hi") == open_model(str(golden_folder)).tokenizer.encode("Hi")
    assert opened.tokenizer.has_template
    assert json.loads((from_file / "config.json").read_text())["model_type"] == "clover_moe"


def weights(folder: str, name: str) -> list[torch.Tensor]:
    opened = open_model(folder)
    loaded = load_parameters(opened.checkpoint, opened.config)
    found: list[Weight] = [*loaded.experts[2].gate_up, *loaded.experts[2].down]
    found.append(loaded.parameters[name])
    return [each.dequantize() if isinstance(each, PackedWeight) else each for each in found]


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_K_M"])
def test_a_quantized_file_is_imported_as_it_is(
    file_type: str, export: Export, tmp_path: Path
) -> None:
    if find_ggml() is None and file_type == "Q4_K_M":
        pytest.skip("libggml-python is not installed")
    path = str(export(file_type))
    source = open_source(path)
    assert isinstance(source, GgufSource)
    destination = tmp_path / "imported"
    import_quantized(source, destination, memory=MEMORY, listener=QUIET)
    for name in ("lm_head.weight", "layers.0.linear_attn.out_proj.weight", "norm.weight"):
        pairs = zip(weights(path, name), weights(str(destination), name), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    opened = open_model(str(destination))
    assert opened.checkpoint.has_diffusion
    assert opened.config.eos_token_id == (507, 506)
