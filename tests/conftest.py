"""Settings and fixtures that every test shares; the only place that reads `tests/data`."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.parameters import PARAMETERS
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import ModelConfig, read_model_config
from clover_local.experts import ResidentExperts
from clover_local.model.clover import Clover

# One thread: the same sums on every machine. Deterministic mode fills `torch.empty*` with NaN, so
# that memory which was never written shows.
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The golden checkpoint: a complete model folder, to be read only."""
    return Path(__file__).parent / "data" / "tiny"


@pytest.fixture
def model_folder(golden_folder: Path, tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in golden_folder.iterdir():
        if path.name not in ("cases.json", "expected.npz"):
            shutil.copyfile(path, copy / path.name)
    return copy


SaveShards = Callable[[Path, Sequence[Mapping[str, Tensor]]], None]


@pytest.fixture(scope="session")
def save_shards() -> SaveShards:
    """Writes tensors as a checkpoint in shards, with the index; removes a single weight file."""

    def save(folder: Path, parts: Sequence[Mapping[str, Tensor]]) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        homes: dict[str, str] = {}
        for number, tensors in enumerate(parts, 1):
            name = f"model-{number:05}-of-{len(parts):05}.safetensors"
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
            homes |= dict.fromkeys(tensors, name)
        index = json.dumps({"metadata": {}, "weight_map": homes})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")

    return save


@pytest.fixture(scope="session")
def golden_config(golden_folder: Path) -> ModelConfig:
    return read_model_config(golden_folder)


@pytest.fixture(scope="session")
def golden_cases(golden_folder: Path) -> Mapping[str, Any]:
    """`cases.json`: prompt, blocks, coresets and whole runs."""
    cases: dict[str, Any] = json.loads((golden_folder / "cases.json").read_text(encoding="utf-8"))
    return cases


@pytest.fixture(scope="session")
def golden_expected(golden_folder: Path) -> Mapping[str, Tensor]:
    """`expected.npz`: logits and states, float32."""
    with np.load(golden_folder / "expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.fixture(scope="session")
def golden_model(golden_folder: Path, golden_config: ModelConfig) -> Clover:
    """The golden checkpoint as a model; tests share it, since a pass changes nothing in it."""
    loaded = load_parameters(open_checkpoint(golden_folder, golden_config), golden_config)
    experts = ResidentExperts(loaded.experts)
    return Clover(
        golden_config, loaded.parameters, experts=experts, device="cpu", dtype=torch.float32
    )


EmptyState = Callable[[ModelConfig], SequenceState]


@pytest.fixture(scope="session")
def empty_state() -> EmptyState:
    """Makes a state in which nothing is committed, with a context of 5,000."""

    def make(config: ModelConfig) -> SequenceState:
        return SequenceState(config, context=5000, device="cpu", dtype=torch.float32)

    return make


@pytest.fixture(scope="session")
def odd_config(golden_config: ModelConfig) -> ModelConfig:
    """Five layers in which no two sizes are equal and few are powers of two."""
    linear, full = "linear_attention", "full_attention"
    return replace(
        golden_config,
        vocab_size=97,
        hidden_size=40,
        num_hidden_layers=5,
        layer_types=(full, linear, linear, full, linear),
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        num_experts=11,
        num_experts_per_tok=3,
        moe_intermediate_size=28,
        shared_expert_intermediate_size=36,
        mask_token_id=96,
        eos_token_id=(1,),
        pad_token_id=0,
    )


RandomParameters = Callable[[ModelConfig], dict[str, Tensor]]


@pytest.fixture(scope="session")
def random_parameters() -> RandomParameters:
    """Makes every parameter of a model of any shape, routed experts included, always the same."""

    def make(config: ModelConfig) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(20)
        parameters = {}
        for template, kind in PARAMETERS.items():
            layers = [i for i, of_type in enumerate(config.layer_types) if of_type in kind.layers]
            for layer in [] if kind.rows_of else layers if kind.layers else [0]:
                shape = kind.shape(config)
                scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
                if template == "embed_tokens.weight":
                    scale = 1.0  # as large as what layers add: rounding then grows little
                parameters[template.format(layer=layer)] = (
                    torch.randn(shape, generator=generator) * scale
                )
        return parameters

    return make


RandomModel = Callable[[ModelConfig], Clover]


@pytest.fixture(scope="session")
def random_model(random_parameters: RandomParameters) -> RandomModel:
    """Makes a model of any shape from `random_parameters`."""

    def make(config: ModelConfig) -> Clover:
        parameters = random_parameters(config)
        experts = ResidentExperts(
            [
                (
                    parameters.pop(f"layers.{layer}.mlp.experts.gate_up_proj"),
                    parameters.pop(f"layers.{layer}.mlp.experts.down_proj"),
                )
                for layer in range(config.num_hidden_layers)
            ]
        )
        return Clover(config, parameters, experts=experts, device="cpu", dtype=torch.float32)

    return make
