"""Reading weights: the same numbers from every layout, one copy, float32 where it is due."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.checkpoint.load import LoadedParameters, load_parameters
from clover_local.checkpoint.parameters import parameter_shapes
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.write import packed_tensors
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError
from clover_local.kernels.packed import PackedWeight, Weight

Tensors = dict[str, Tensor]
Rewrite = Callable[[Path, Callable[[Tensors], object]], None]
SaveShards = Callable[[Path, Sequence[Mapping[str, Tensor]]], None]


def load(folder: Path, config: ModelConfig) -> LoadedParameters:
    return load_parameters(open_checkpoint(folder, config), config)


def plain(weight: Weight | Sequence[Weight]) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def packed(weight: Weight) -> PackedWeight:
    assert isinstance(weight, PackedWeight)
    return weight


def assert_same(loaded: LoadedParameters, expected: LoadedParameters) -> None:
    """Bit for bit."""
    assert loaded.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert plain(loaded.parameters[name]).dtype == plain(value).dtype, name
        assert torch.equal(plain(loaded.parameters[name]), plain(value)), name
    assert len(loaded.experts) == len(expected.experts)
    for experts, other in zip(loaded.experts, expected.experts, strict=True):
        assert torch.equal(plain(experts.gate_up), plain(other.gate_up))
        assert torch.equal(plain(experts.down), plain(other.down))


@pytest.fixture(scope="session")
def expected(golden_folder: Path, golden_config: ModelConfig) -> LoadedParameters:
    return load(golden_folder, golden_config)


@pytest.fixture
def tensors(model_folder: Path) -> Tensors:
    return load_file(model_folder / "model.safetensors")


def per_expert(tensors: Tensors) -> Tensors:
    apart = {}
    for name, value in tensors.items():
        if name.endswith("gate_up_proj"):
            for expert, rows in enumerate(value):
                stem = name.replace("gate_up_proj", f"{expert}.")
                apart[f"{stem}gate_proj.weight"], apart[f"{stem}up_proj.weight"] = rows.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(value):
                apart[name.replace("down_proj", f"{expert}.down_proj.weight")] = rows
        else:
            apart[name] = value
    return apart


def nested(tensors: Tensors) -> Tensors:
    return {re.sub(r"^model\.", "model.language_model.", k): v for k, v in tensors.items()}


def taps_with_three_axes(tensors: Tensors) -> Tensors:
    return {k: v[:, None] if "conv_right" in k else v for k, v in tensors.items()}


def taps_with_two_axes(tensors: Tensors) -> Tensors:
    return {k: v[:, 0] if "conv1d" in k else v for k, v in tensors.items()}


def everything(tensors: Tensors) -> Tensors:
    return nested(taps_with_three_axes(per_expert(tensors)))


@pytest.mark.parametrize("number_of_shards", [1, 3])
@pytest.mark.parametrize(
    "layout", [dict, per_expert, nested, taps_with_three_axes, taps_with_two_axes, everything]
)
def test_every_layout_loads_the_same_bits(
    model_folder: Path,
    golden_config: ModelConfig,
    tensors: Tensors,
    expected: LoadedParameters,
    save_shards: SaveShards,
    layout: Callable[[Tensors], Tensors],
    number_of_shards: int,
) -> None:
    changed = layout(tensors)
    names = list(changed)
    parts = [
        {name: changed[name] for name in names[start::number_of_shards]}
        for start in range(number_of_shards)
    ]
    save_shards(model_folder, parts)
    assert_same(load(model_folder, golden_config), expected)


def test_parameters_have_the_values_of_the_file_in_float32(
    tensors: Tensors, expected: LoadedParameters
) -> None:
    p = expected.parameters
    assert torch.equal(plain(p["lm_head.weight"]), tensors["lm_head.weight"].float())
    taps = tensors["model.layers.1.linear_attn.conv1d.weight"]
    assert torch.equal(plain(p["layers.1.linear_attn.conv1d.weight"]), taps.float()[:, 0])
    assert p["layers.1.linear_attn.conv_right_weight"].shape == (256, 3)
    gate_up = tensors["model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(plain(expected.experts[2].gate_up), gate_up.float())
    assert len(p) == 84 - 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_other_float_types_on_disk_load_too(
    model_folder: Path,
    golden_config: ModelConfig,
    tensors: Tensors,
    expected: LoadedParameters,
    dtype: torch.dtype,
) -> None:
    stored = {name: value.to(dtype) for name, value in tensors.items()}
    save_file(stored, model_folder / "model.safetensors")
    loaded = load(model_folder, golden_config)
    for name, value in expected.parameters.items():
        assert torch.equal(plain(loaded.parameters[name]), plain(value).to(dtype).float()), name


@pytest.mark.parametrize("layout", [dict, per_expert])
def test_in_bfloat16_only_the_small_sensitive_parameters_stay_float32(
    model_folder: Path,
    golden_config: ModelConfig,
    tensors: Tensors,
    expected: LoadedParameters,
    layout: Callable[[Tensors], Tensors],
) -> None:
    save_file(
        {name: value.contiguous() for name, value in layout(tensors).items()},
        model_folder / "model.safetensors",
    )
    checkpoint = open_checkpoint(model_folder, golden_config)
    loaded = load_parameters(checkpoint, golden_config, dtype=torch.bfloat16)
    sensitive = re.compile(
        r"norm\.weight|layernorm|_norm|A_log|dt_bias|conv|bd_softmax|mlp\.gate\.weight"
    )
    for name, value in loaded.parameters.items():
        wanted = torch.float32 if sensitive.search(name) else torch.bfloat16
        assert plain(value).dtype == wanted, name
        assert torch.equal(plain(value).float(), plain(expected.parameters[name])), name
    for experts, other in zip(loaded.experts, expected.experts, strict=True):
        for weight, same in zip(experts, other, strict=True):
            assert plain(weight).dtype == torch.bfloat16
            assert torch.equal(plain(weight).float(), plain(same))


def test_tied_embeddings_are_one_tensor(
    model_folder: Path, golden_config: ModelConfig, tensors: Tensors
) -> None:
    del tensors["lm_head.weight"]
    save_file(tensors, model_folder / "model.safetensors")
    tied = replace(golden_config, tie_word_embeddings=True)
    parameters = load(model_folder, tied).parameters
    assert parameters["lm_head.weight"] is parameters["embed_tokens.weight"]


def test_a_causal_only_file_loads_without_diffusion_parameters(
    model_folder: Path, golden_config: ModelConfig, tensors: Tensors
) -> None:
    causal = {k: v for k, v in tensors.items() if "conv_right" not in k and "bd_" not in k}
    save_file(causal, model_folder / "model.safetensors")
    assert len(load(model_folder, golden_config).parameters) == 84 - 8 - 12


def test_misfits_are_refused_before_anything_is_read(
    model_folder: Path, golden_config: ModelConfig
) -> None:
    checkpoint = open_checkpoint(model_folder, replace(golden_config, vocab_size=513))
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the weights do not fit the config: 2 misshapen"):
        load_parameters(checkpoint, golden_config)


def test_progress_counts_the_bytes_of_every_tensor(
    golden_folder: Path, golden_config: ModelConfig
) -> None:
    reports: list[tuple[int, int]] = []
    load_parameters(
        open_checkpoint(golden_folder, golden_config),
        golden_config,
        on_progress=lambda done, total: reports.append((done, total)),
    )
    assert len(reports) == 84
    assert {total for _, total in reports} == {427804 * 2}
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (427804 * 2, 427804 * 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tensor_of_the_wanted_type_stays_in_the_memory_map(
    model_folder: Path, golden_config: ModelConfig
) -> None:
    loaded = load_parameters(
        open_checkpoint(model_folder, golden_config), golden_config, dtype=torch.bfloat16
    )
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in maps
        if line.endswith(str(model_folder / "model.safetensors"))
    ]

    def is_mapped(value: Weight | Sequence[Weight]) -> bool:
        return any(plain(value).data_ptr() in addresses for addresses in ranges)

    assert is_mapped(loaded.parameters["embed_tokens.weight"])
    assert all(is_mapped(experts.gate_up) for experts in loaded.experts)
    assert not is_mapped(loaded.parameters["norm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_packed_matrices_are_views_of_the_files(
    quantized_folder: Path, golden_config: ModelConfig, dtype: torch.dtype
) -> None:
    loaded = load_parameters(
        open_checkpoint(quantized_folder, golden_config), golden_config, dtype=dtype
    )
    head = packed(loaded.parameters["lm_head.weight"])
    assert (head.bits, head.group_size, head.shape) == (8, 32, (512, 64))
    assert plain(loaded.parameters["layers.0.mlp.gate.weight"]).dtype == torch.float32
    assert plain(loaded.parameters["embed_tokens.weight"]).dtype == dtype
    for experts in loaded.experts:
        storage = packed(experts.down[0]).data.untyped_storage().data_ptr()
        start = packed(experts.gate_up[0]).data.data_ptr()
        for gate_up, down in zip(experts.gate_up, experts.down, strict=True):
            weights = packed(gate_up), packed(down)
            assert [weight.shape for weight in weights] == [(64, 64), (64, 32)]
            for weight in weights:
                for part in (weight.data, weight.scale):  # one record, then the next
                    assert part.data_ptr() == start
                    assert part.untyped_storage().data_ptr() == storage
                    start += part.nbytes


def test_packed_parts_that_are_apart_are_joined_by_copying(
    quantized_copy: Path, golden_config: ModelConfig, rewrite: Rewrite, save_shards: SaveShards
) -> None:
    before = load(quantized_copy, golden_config)

    def split(tensors: Tensors) -> None:
        names = sorted(tensors)
        shards = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
        save_shards(quantized_copy, shards)

    rewrite(quantized_copy, split)
    (quantized_copy / "model.safetensors").unlink()
    after = load(quantized_copy, golden_config)
    for experts, others in zip(before.experts, after.experts, strict=True):
        for weights, same in zip(experts, others, strict=True):
            for weight, other in zip(weights, same, strict=True):
                assert torch.equal(packed(weight).dequantize(), packed(other).dequantize())


def test_bytes_that_are_not_aligned_load_too(
    quantized_folder: Path, quantized_copy: Path, golden_config: ModelConfig
) -> None:
    before = load(quantized_folder, golden_config)
    path = quantized_copy / "model-00001-of-00005.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    moved = (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" "
    path.write_bytes(moved + content[8 + length :])
    after = load(quantized_copy, golden_config)
    for weight, other in zip(before.experts[0].gate_up, after.experts[0].gate_up, strict=True):
        assert torch.equal(packed(weight).dequantize(), packed(other).dequantize())


def test_packed_and_plain_experts_may_share_a_layer(
    quantized_copy: Path, golden_config: ModelConfig, rewrite: Rewrite
) -> None:
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    values = torch.randn(64, 32).bfloat16()

    def edit(tensors: Tensors) -> None:
        for part in ("packed", "scale", "shape"):
            del tensors[f"{name}_{part}"]
        tensors[name] = values

    rewrite(quantized_copy, edit)
    down = load(quantized_copy, golden_config).experts[1].down
    assert [isinstance(weight, Tensor) for weight in down] == [e == 5 for e in range(8)]
    assert torch.equal(plain(down[5]), values.float())


@pytest.mark.parametrize("moved", [0.0, 1e-4], ids=["zero-points", "minima"])
def test_asymmetric_matrices_load_with_minima(
    quantized_copy: Path,
    golden_config: ModelConfig,
    round_matrix: Callable[..., PackedWeight],
    rewrite: Rewrite,
    moved: float,
) -> None:
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    weight = round_matrix(values, bits=8, asymmetric=True)
    assert weight.minimum is not None
    weight = replace(weight, minimum=weight.minimum + moved)
    parts = packed_tensors("lm_head", weight)
    rewrite(quantized_copy, lambda t: t.update({n.name: n.tensor for n in parts.main + parts.last}))
    loaded = packed(load(quantized_copy, golden_config).parameters["lm_head.weight"])
    assert loaded.minimum is not None and weight.minimum is not None
    assert torch.equal(loaded.minimum, weight.minimum)
    assert torch.equal(loaded.dequantize(), weight.dequantize())


def test_parameter_shapes_are_those_of_a_loaded_model(
    golden_config: ModelConfig, expected: LoadedParameters
) -> None:
    shapes = {name: tuple(value.shape) for name, value in expected.parameters.items()}
    for layer, experts in enumerate(expected.experts):
        shapes[f"layers.{layer}.mlp.experts.gate_up_proj"] = tuple(plain(experts.gate_up).shape)
        shapes[f"layers.{layer}.mlp.experts.down_proj"] = tuple(plain(experts.down).shape)
    assert parameter_shapes(golden_config) == shapes
