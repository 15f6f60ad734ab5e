"""Settings and fixtures that every test shares; the only place that reads `tests/data`."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.parameters import PARAMETERS
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.quantization import quantization_config
from clover_local.checkpoint.read import read_experts, read_layer, read_outer
from clover_local.checkpoint.shards import read_shard
from clover_local.checkpoint.summary import SUMMARY_NAME, summarize
from clover_local.checkpoint.write import (
    NamedTensor,
    PackedTensors,
    expert_tensors,
    packed_tensors,
    shard_name,
    write_file,
    write_index,
    write_json,
    write_shard,
)
from clover_local.config import ModelConfig, read_model_config
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.int4 import pack
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.model.clover import Clover
from clover_local.session import Session

# Without a GPU, Triton's kernels run in its interpreter. The variable is read when triton is loaded
# and by every `@triton.jit`, so it has to be there before the first test needs a kernel; the line
# about deterministic algorithms below imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The settings of whoever runs the tests are none of theirs.
os.environ["CLOVER_CONFIG"] = os.devnull

# One thread: the same sums on every machine. Deterministic mode fills `torch.empty*` with NaN, so
# that memory which was never written shows.
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)


def answer_of(session: Session, prompt: Sequence[int]) -> tuple[int, ...]:
    """The token ids that a session answers `prompt` with."""
    for _ in session.generator.run(prompt):
        pass
    result = session.generator.result
    assert result is not None
    return result.token_ids


PACKED_TRUNK = tuple(
    name.rpartition("{layer}")[2]
    for name, kind in PARAMETERS.items()
    if kind.packable and not kind.rows_of
)


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


class RoundMatrix(Protocol):
    """Rounds a matrix to the nearest integers in groups."""

    def __call__(
        self, weight: Tensor, *, bits: int = 4, group_size: int = 32, asymmetric: bool = False
    ) -> PackedWeight: ...


@pytest.fixture(scope="session")
def round_matrix() -> RoundMatrix:
    """Makes packed weights; the minima of asymmetric ones are whole multiples of the scale."""

    def make(
        weight: Tensor, *, bits: int = 4, group_size: int = 32, asymmetric: bool = False
    ) -> PackedWeight:
        groups = weight.float().view(len(weight), -1, group_size)
        half, steps = 1 << (bits - 1), (1 << bits) - 1
        low, high = groups.amin(-1), groups.amax(-1)
        spread = high - low if asymmetric else 2 * groups.abs().amax(-1)
        scale = (spread / steps).bfloat16()
        zero = (-low / scale.float()).round().clamp(0, steps) if asymmetric else half + 0 * low
        stored = (groups / scale.float()[..., None]).round() + zero[..., None]
        values = (stored.clamp(0, steps) - half).to(torch.int8).flatten(1)
        minimum = -zero * scale.float() if asymmetric else None
        return PackedWeight(pack(values, bits), scale, minimum, bits, group_size)

    return make


@pytest.fixture(scope="session")
def quantized_folder(
    golden_folder: Path,
    golden_config: ModelConfig,
    round_matrix: RoundMatrix,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The golden checkpoint with INT4 experts and INT8 in the other matrices, to be read only."""
    source = open_checkpoint(golden_folder, golden_config)
    folder = tmp_path_factory.mktemp("quantized")

    def stored(name: str, weight: Weight) -> PackedTensors:
        if isinstance(weight, Tensor) and name.endswith(PACKED_TRUNK):
            return packed_tensors(name.removesuffix(".weight"), round_matrix(weight, bits=8))
        assert isinstance(weight, Tensor)
        return PackedTensors((NamedTensor(name, weight),))

    shards: list[list[PackedTensors]] = []
    for layer in range(golden_config.num_hidden_layers):
        shard = []
        weights = read_experts(source, golden_config, layer, range(golden_config.num_experts))
        for expert, (gate_up, down) in enumerate(zip(*weights, strict=True)):
            gate, up, down = (round_matrix(rows) for rows in (*gate_up.chunk(2), down))
            name = f"model.layers.{layer}.mlp.experts.{expert}."
            shard.append(expert_tensors(name, gate, up=up, down=down))
        for name, weight in read_layer(source, golden_config, layer).items():
            shard.append(stored(f"model.{name}", weight))
        shards.append(shard)
    outer = read_outer(source, golden_config)
    prefixes = {"lm_head.weight": ""}
    shards.append([stored(prefixes.get(k, "model.") + k, weight) for k, weight in outer.items()])
    paths = [folder / shard_name(n, len(shards)) for n in range(1, len(shards) + 1)]
    for path, parts in zip(paths, shards, strict=True):
        main = [tensor for part in parts for tensor in part.main]
        write_shard(path, main + [tensor for part in parts for tensor in part.last])
    write_index(folder, [read_shard(path) for path in paths])
    checkpoint = open_checkpoint(folder, golden_config)
    config = json.loads((golden_folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(checkpoint)
    write_json(folder / "config.json", config)
    write_json(folder / SUMMARY_NAME, summarize(checkpoint).to_json())
    for path in [*golden_folder.glob("*token*.json"), golden_folder / "generation_config.json"]:
        write_file(folder / path.name, path.read_bytes())
    return folder


@pytest.fixture
def quantized_copy(quantized_folder: Path, tmp_path: Path) -> Path:
    """A copy of the quantized golden checkpoint that a test may change."""
    return Path(shutil.copytree(quantized_folder, tmp_path / "quantized"))


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


@pytest.fixture(scope="session")
def real_config(golden_config: ModelConfig) -> ModelConfig:
    """The sizes of Clover-35B-A3B."""
    linear, full = "linear_attention", "full_attention"
    return replace(
        golden_config,
        vocab_size=248320,
        hidden_size=2048,
        num_hidden_layers=40,
        layer_types=(linear, linear, linear, full) * 10,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        max_position_embeddings=131072,
        mask_token_id=248077,
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
        return Clover(config, {**parameters}, experts=experts, device="cpu", dtype=torch.float32)

    return make
