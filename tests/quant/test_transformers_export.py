"""Our INT4 files in stock transformers, through compressed-tensors, where those are installed.

transformers holds experts as one tensor, so it dequantizes them while it loads, in the dtype of the
scales: with those of bfloat16, which we write, each weight is rounded once more. Scales widened to
float32, which changes no weight, show that nothing else differs.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import ModelConfig, read_model_config
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.model.clover import Clover
from clover_local.quant.pipeline.run import quantize
from clover_local.quant.pipeline.source import PlainSource, open_source
from clover_local.quant.profiles import Choices, resolve

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")

DIFFUSION = ("conv_right_weight", "bd_softmax_")
OURS = ("block_size", "mask_token_id", "denoising_config")


@pytest.fixture(scope="module")
def exported(golden_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model at INT4, its trunk and head at INT8."""
    source = open_source(str(golden_folder))
    assert isinstance(source, PlainSource)
    choices = Choices(calibration_tokens=300, evaluation_tokens=0)
    recipe, _ = resolve(choices, source.config, device="cpu")
    folder = tmp_path_factory.mktemp("exported")
    quantize(source, folder, recipe=recipe)
    return folder


def strip(exported: Path, folder: Path, *, scale_dtype: torch.dtype) -> None:
    """A copy without what only our model has."""
    values = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key not in OURS}
    values |= {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    tensors = {}
    for shard in exported.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            if not any(family in name for family in DIFFUSION):
                tensors[name] = tensor.to(scale_dtype) if name.endswith("_scale") else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def theirs(folder: Path, tokens: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.nn.Module.float(model)  # its own `float` refuses, yet its experts are bfloat16
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def ours(
    exported: Path,
    tokens: list[int],
    empty_state: Callable[[ModelConfig], SequenceState],
    of_expert: Callable[[Weight], Weight],
) -> Tensor:
    config = read_model_config(exported)
    loaded = load_parameters(open_checkpoint(exported, config), config)
    experts = [
        ([of_expert(weight) for weight in gate_up], [of_expert(weight) for weight in down])
        for gate_up, down in loaded.experts
    ]
    model = Clover(
        config,
        loaded.parameters,
        experts=ResidentExperts(experts),
        device="cpu",
        dtype=torch.float32,
    )
    return model.commit(tokens, empty_state(config), logits="all").logits


def in_scale_dtype(weight: Weight) -> Tensor:
    """As compressed-tensors dequantizes."""
    assert isinstance(weight, PackedWeight)
    return weight.dequantize().to(weight.scale.dtype).float()


@pytest.mark.parametrize(
    ("scale_dtype", "of_expert"),
    [(torch.float32, lambda weight: weight), (torch.bfloat16, in_scale_dtype)],
    ids=["wide-scales", "as-written"],
)
def test_causal_logits_are_those_of_transformers(
    exported: Path,
    tmp_path: Path,
    golden_cases: Mapping[str, Any],
    empty_state: Callable[[ModelConfig], SequenceState],
    scale_dtype: torch.dtype,
    of_expert: Callable[[Weight], Weight],
) -> None:
    tokens = [*golden_cases["prompt"], *golden_cases["commit_block"]]
    strip(exported, tmp_path, scale_dtype=scale_dtype)
    got = theirs(tmp_path, tokens)
    expected = ours(exported, tokens, empty_state, of_expert)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
