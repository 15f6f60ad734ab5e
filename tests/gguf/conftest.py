"""Small GGUF files for the tests of this folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clover_local.config import ModelConfig, parse_model_config
from clover_local.gguf.container import MetaValue
from clover_local.gguf.export.mixtures import mixture
from clover_local.gguf.export.run import export_gguf, make_plan
from clover_local.gguf.export.source import Source
from clover_local.gguf.imatrix import Sums
from clover_local.gguf.types import TYPES
from clover_local.gguf.write import PlannedTensor, lay_out
from clover_local.session import open_model
from tests.conftest import RandomParameters, SaveShards

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes float32 tensors, counting up from 0, and metadata to a file."""

    def write(
        name: str = "model.gguf",
        *,
        metadata: Mapping[str, MetaValue] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Path:
        shapes = {"a": (2, 32), "b": (5,)} if shapes is None else shapes
        planned = [PlannedTensor(key, TYPES["F32"], tuple(shape)) for key, shape in shapes.items()]
        layout = lay_out(
            {"general.architecture": "none"} if metadata is None else metadata, planned
        )
        content = bytearray(layout.nbytes)
        content[: len(layout.header)] = layout.header
        for tensor, start in zip(planned, layout.starts, strict=True):
            numbers = np.arange(tensor.nbytes // 4, dtype="<f4")
            content[start : start + tensor.nbytes] = numbers.tobytes()
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def real_config() -> ModelConfig:
    """The shape of Clover-35B-A3B."""
    values = {
        "model_type": "clover_moe",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "block_size": 32,
        "mask_token_id": 248077,
    }
    return parse_model_config(values, "real")


OpenSource = Callable[[str], Source]


@pytest.fixture(scope="session")
def open_source() -> OpenSource:
    """Opens a model as what the exporter takes."""

    def open_it(model: str) -> Source:
        opened = open_model(model)
        return Source(
            "a model", opened.checkpoint, opened.config, opened.generation, opened.tokenizer
        )

    return open_it


ExportTo = Callable[..., Path]


@pytest.fixture(scope="session")
def export_to(open_source: OpenSource) -> ExportTo:
    """Exports a model to a file, by default with everything in it."""

    def export(
        model: str,
        path: Path,
        *,
        file_type: str = "F32",
        architecture: str = "qwen35moe",
        diffusion: str = "embed",
        imatrix: dict[str, Sums] | None = None,
    ) -> Path:
        source = open_source(model)
        mix = mixture(file_type, None, has_imatrix=imatrix is not None)
        plan = make_plan(
            source, mix, architecture=architecture, diffusion=diffusion, imatrix=imatrix
        )
        return export_gguf(source, path, plan, diffusion=diffusion, jobs=2).path

    return export


@pytest.fixture(scope="session")
def wide_folder(
    golden_folder: Path,
    golden_config: ModelConfig,
    random_parameters: RandomParameters,
    save_shards: SaveShards,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A random model with the real model's head dimensions and rows of multiples of 256."""
    sizes = {
        "hidden_size": 256,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    }
    folder = tmp_path_factory.mktemp("wide")
    for path in golden_folder.glob("*token*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((golden_folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **sizes}), encoding="utf-8")
    parameters = random_parameters(replace(golden_config, **sizes))  # type: ignore[arg-type]
    prefixed = {
        name if name == "lm_head.weight" else f"model.{name}": tensor.bfloat16()
        for name, tensor in parameters.items()
    }
    save_shards(folder, [prefixed])
    return folder
