"""Fresh parameters: complete, and able to look things up before any training."""

from pathlib import Path
from types import ModuleType

import torch

import clover_local.demo
from clover_local.checkpoint.parameters import parameter_shapes
from clover_local.config import ModelConfig, read_model_config

FOLDER = Path(clover_local.demo.__file__).parent


def config() -> ModelConfig:
    return read_model_config(FOLDER)


def test_every_parameter_of_the_checkpoint_is_made_in_its_shape(demo_init: ModuleType) -> None:
    params = demo_init.initial_parameters(config(), 1)
    shapes = {name.removeprefix("model."): value.squeeze().shape for name, value in params.items()}
    wanted = {
        name: torch.empty(shape).squeeze().shape
        for name, shape in parameter_shapes(config()).items()
    }
    assert shapes == wanted


def test_the_same_seed_makes_the_same_parameters(demo_init: ModuleType) -> None:
    first, again, other = (demo_init.initial_parameters(config(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(first[name], other[name])


def test_like_finds_like_and_values_come_back(demo_init: ModuleType) -> None:
    params = demo_init.initial_parameters(config(), 1)
    x = torch.randn(5, config().hidden_size, generator=torch.Generator().manual_seed(0))
    p = "model.layers.3.self_attn."
    q = (x @ params[p + "q_proj.weight"].T).view(5, 4, 2, 32)[:, 0, 0]  # the first head's query
    k = (x @ params[p + "k_proj.weight"].T).view(5, 2, 32)[:, 0]
    assert (q @ k.T).argmax(-1).tolist() == [0, 1, 2, 3, 4]
    p = "model.layers.0.linear_attn."
    values = x @ params[p + "in_proj_qkv.weight"][128:].T
    written = values @ params[p + "out_proj.weight"].T
    assert torch.nn.functional.cosine_similarity(written, x).min() > 0.5
