"""Model folders with weights as other programs quantize them, and what those weights are."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.checkpoint.parameters import targets
from clover_local.config import ModelConfig, parse_model_config, read_model_config
from clover_local.kernels.packed import Weight
from clover_local.quant.importers.foreign import ForeignCheckpoint, open_foreign

# What these tests quantize: all experts and those trunk matrices that are large enough.
PACKED = r"experts\.\d+\.|shared_expert\.|q_proj|k_proj|v_proj|o_proj|out_proj|in_proj_qkv"


@dataclass(frozen=True)
class Stored:
    """A matrix as integers: weight[n, k] = (values[n, k] - zeros[n, g]) * scale[n, g]."""

    values: NDArray[np.int64]  # [N, K], 0 .. 2^bits - 1
    zeros: NDArray[np.int64]  # [N, G]
    scale: Tensor  # [N, G]
    bits: int

    @property
    def group_size(self) -> int:
        return int(self.values.shape[1] // self.zeros.shape[1])

    @property
    def weight(self) -> Tensor:
        """The definition, in float64."""
        zeros = np.repeat(self.zeros, self.group_size, axis=1)
        scale = self.scale.double().repeat_interleave(self.group_size, dim=1)
        return torch.from_numpy(self.values - zeros) * scale


RandomStored = Callable[..., Stored]
Pack = Callable[[str, Stored], dict[str, Tensor]]


@pytest.fixture(scope="session")
def random_stored() -> RandomStored:
    """Makes a matrix; the smallest and largest integers are in it."""

    def make(
        rows: int,
        columns: int,
        *,
        bits: int = 4,
        group_size: int = 32,
        symmetric: bool = True,
        dtype: torch.dtype = torch.float16,
        lowest_zero: int = 0,
        seed: int = 0,
    ) -> Stored:
        random = np.random.default_rng((rows, columns, seed))
        values = random.integers(0, 2**bits, (rows, columns))
        values[0, 0], values[-1, -1] = 0, 2**bits - 1
        zeros = np.full((rows, columns // group_size), 2 ** (bits - 1))
        if not symmetric:
            zeros = random.integers(lowest_zero, lowest_zero + 2**bits, zeros.shape)
            zeros[0, 0], zeros[-1, -1] = lowest_zero, lowest_zero + 2**bits - 1
        scale = torch.from_numpy(random.uniform(0.001, 0.1, zeros.shape)).to(dtype)
        return Stored(values, zeros, scale, bits)

    return make


@dataclass
class ForeignFolder:
    """A model folder that a test may change before it opens it."""

    path: Path
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    expected: dict[str, Tensor] = field(default_factory=dict)
    """float64 weights by name without prefix."""

    @property
    def settings(self) -> dict[str, Any]:
        """`quantization_config`."""
        settings: dict[str, Any] = self.values["quantization_config"]
        return settings

    def open(self) -> ForeignCheckpoint:
        """Writes the files and opens them."""
        (self.path / "config.json").write_text(json.dumps(self.values), encoding="utf-8")
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()},
            self.path / "model.safetensors",
        )
        config = parse_model_config(self.values, str(self.path / "config.json"))
        return open_foreign(self.path, config, config_json=self.values)


MakeForeign = Callable[..., ForeignFolder]


@pytest.fixture
def make_foreign(golden_folder: Path, tmp_path: Path, random_stored: RandomStored) -> MakeForeign:
    """Makes a folder whose matrices of names like `packed` are as `pack` makes them."""
    weights = load_file(golden_folder / "model.safetensors")
    config = read_model_config(golden_folder)

    def make(
        pack: Pack,
        settings: Mapping[str, Any],
        *,
        packed: str = PACKED,
        prefix: str = "model.",
        **stored: Any,
    ) -> ForeignFolder:
        values = json.loads((golden_folder / "config.json").read_text(encoding="utf-8"))
        values["quantization_config"] = dict(settings)
        path = tmp_path / "foreign"
        path.mkdir()
        folder = ForeignFolder(path, {}, values)
        for seed, (name, target) in enumerate(targets(config, prefix=prefix, per_expert=True)):
            own_name = name.removeprefix(prefix)
            if re.search(packed, own_name):
                matrix = random_stored(*target.shape, seed=seed, **stored)
                folder.tensors |= pack(name.removesuffix(".weight"), matrix)
                folder.expected[own_name] = matrix.weight
                continue
            source = weights[
                "lm_head.weight" if own_name == "lm_head.weight" else "model." + target.name
            ]
            if target.expert is not None:
                source = source[target.expert, target.first_row :][: target.shape[0]]
            folder.tensors[name] = source.clone()
            folder.expected[own_name] = source.double().view(target.shape)
        return folder

    return make


@pytest.fixture(scope="session")
def require_equal() -> Callable[[ForeignCheckpoint, ModelConfig, Mapping[str, Tensor]], None]:
    """Checks that a checkpoint reads as the `expected` weights, to the last bit."""

    def wide(weight: Weight) -> Tensor:
        return (weight if isinstance(weight, Tensor) else weight.dequantize()).double()

    def check(
        foreign: ForeignCheckpoint, config: ModelConfig, expected: Mapping[str, Tensor]
    ) -> None:
        got = {name: wide(weight) for name, weight in foreign.read_outer().items()}
        for layer in range(config.num_hidden_layers):
            got |= {name: wide(weight) for name, weight in foreign.read_layer(layer).items()}
            order = [3, *range(config.num_experts)]
            experts = foreign.read_experts(layer, order)
            for expert, gate_up, down in zip(order, experts.gate_up, experts.down, strict=True):
                prefix = f"layers.{layer}.mlp.experts.{expert}."
                gate, up = wide(gate_up).chunk(2)
                got[prefix + "gate_proj.weight"] = gate
                got[prefix + "up_proj.weight"] = up
                got[prefix + "down_proj.weight"] = wide(down)
        assert got.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(got[name], weight), name

    return check
