"""The diffusion parameters, which llama.cpp has no tensors for: as metadata of a file or a sidecar.

    clover.block_size, .mask_token_id, .threshold, .coreset_enabled, .coreset_top_p
    clover.generation.KEY           response controls, as in generation_config.json
    clover.blk.{layer}.conv_right   float32 [C * 3], taps of one channel next to each other
    clover.blk.{layer}.logit_scale, .history_bias, .history_c      float32 [value heads]

Heads are in the checkpoint's order. Stock llama.cpp ignores keys that it does not know. A sidecar
holds these keys alone, with a fingerprint: sizes, and numbers of tensors that files of every type
keep in float32. So it finds its model whoever quantized that.
"""

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clover_local.checkpoint.parameters import PARAMETERS
from clover_local.checkpoint.shards import TensorInfo
from clover_local.config import LINEAR_ATTENTION, GenerationConfig, ModelConfig
from clover_local.errors import CheckpointError
from clover_local.gguf.container import TYPE_KEY, GgufFile, MetaValue, read_file
from clover_local.gguf.values import Values

SUFFIX = ".diffusion.gguf"
SIDECAR_TYPE = "clover-diffusion"
FORMAT_KEY = "clover.format_version"
FORMAT_VERSION = 1

FAMILIES = {
    "conv_right": "layers.{layer}.linear_attn.conv_right_weight",
    "logit_scale": "layers.{layer}.linear_attn.bd_softmax_logit_scale",
    "history_bias": "layers.{layer}.linear_attn.bd_softmax_history_bias",
    "history_c": "layers.{layer}.linear_attn.bd_softmax_history_c",
}
_SIZES = "clover.fingerprint.sizes"
_NUMBERS = "clover.fingerprint.numbers"
_SAMPLED = (  # of the first and the last Gated DeltaNet layer; float32 in files of every type
    "layers.{layer}.linear_attn.dt_bias",
    "layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.mlp.gate.weight",
)
_SAMPLES = 32  # numbers of each
_TOLERANCE = 1e-3  # of the largest of a sample: more than float16 rounds, less than training moves

Floats = NDArray[np.float32]


def array_key(family: str, layer: int) -> str:
    """The key of one array."""
    return f"clover.blk.{layer}.{family}"


def gdn_layers(config: ModelConfig) -> list[int]:
    """The layers that have diffusion parameters."""
    return [layer for layer, kind in enumerate(config.layer_types) if kind == LINEAR_ATTENTION]


def control_metadata(config: ModelConfig, generation: GenerationConfig) -> dict[str, MetaValue]:
    """What decoding needs to know besides the arrays."""
    metadata: dict[str, MetaValue] = {
        FORMAT_KEY: FORMAT_VERSION,
        "clover.block_size": config.block_size,
        "clover.mask_token_id": config.mask_token_id,
        "clover.threshold": config.threshold,
        "clover.coreset_enabled": config.coreset_enabled,
        "clover.coreset_top_p": config.coreset_top_p,
    }
    for name, value in generation.changes.items():
        key = f"clover.generation.{name}"
        metadata[key] = np.array(value, "<i4") if isinstance(value, tuple) else value
    return metadata


def array_metadata(config: ModelConfig, read: Callable[[str], Floats]) -> dict[str, MetaValue]:
    """The arrays of all layers; `read` gives a parameter by its name without prefix."""
    return {
        array_key(family, layer): read(name.format(layer=layer)).astype("<f4").ravel()
        for layer in gdn_layers(config)
        for family, name in FAMILIES.items()
    }


def fingerprint_metadata(
    config: ModelConfig, read: Callable[[str], Floats]
) -> dict[str, MetaValue]:
    """What tells the model that a sidecar belongs to."""
    return {
        _SIZES: np.array(_sizes(config), "<i4"),
        _NUMBERS: np.concatenate(_samples(config, read)).astype("<f4"),
    }


def require_same_sizes(sidecar: GgufFile, config: ModelConfig, *, model: Path) -> None:
    """Raises CheckpointError where a sidecar's fingerprint has other sizes than the model."""
    if list(Values(sidecar.metadata, str(sidecar.path)).integers(_SIZES)) != _sizes(config):
        raise _of_another_model(sidecar, model)


def require_same_numbers(
    sidecar: GgufFile, config: ModelConfig, read: Callable[[str], Floats], *, model: Path
) -> None:
    """Raises CheckpointError where a sidecar's fingerprint has other numbers than the model.

    Args:
        read: gives a parameter of the model by its name without prefix.
    """
    expected, start = Values(sidecar.metadata, str(sidecar.path)).floats(_NUMBERS), 0
    for found in _samples(config, read):
        wanted = expected[start : start + len(found)]
        start += len(found)
        if len(wanted) != len(found):
            raise _of_another_model(sidecar, model)
        if not np.allclose(found, wanted, rtol=0, atol=_TOLERANCE * float(np.abs(wanted).max())):
            raise _of_another_model(sidecar, model)


def _of_another_model(sidecar: GgufFile, model: Path) -> CheckpointError:
    return CheckpointError(
        f"{sidecar.path} belongs to another model than {model}: make the right one with "
        "`clover-local export diffusion CHECKPOINT OUT`, or move it away"
    )


def find_sidecar(path: Path) -> Path | None:
    """`NAME.diffusion.gguf` beside `NAME.gguf`, if it is there; for split files without numbers."""
    stem = path.name.removesuffix(".gguf")
    head, _, count = stem.rpartition("-of-")
    names = [stem, *([head.rpartition("-")[0]] if head and count.isdigit() else [])]
    paths = (sidecar_path(path, name) for name in names)
    # Not `is_file`: a link to nothing, or a folder, is to be complained about by the reader.
    return next((found for found in paths if os.path.lexists(found)), None)


def sidecar_path(path: Path, stem: str | None = None) -> Path:
    """Where the sidecar of a file lies."""
    return path.with_name((stem or path.name.removesuffix(".gguf")) + SUFFIX)


def read_sidecar(path: Path) -> GgufFile:
    """A sidecar's metadata.

    Raises:
        CheckpointError: a bad file, or no sidecar.
    """
    file = read_file(path)
    if file.metadata.get(TYPE_KEY) != SIDECAR_TYPE:
        raise CheckpointError(
            f"{path} holds no diffusion parameters: make it with "
            "`clover-local export diffusion CHECKPOINT OUT`, or move it away"
        )
    return file


def has_arrays(metadata: Mapping[str, MetaValue]) -> bool:
    """Whether a file brings the diffusion parameters with it."""
    return any(key.startswith("clover.blk.") for key in metadata)


def array_places(file: GgufFile, config: ModelConfig) -> dict[str, TensorInfo]:
    """Where in the file each parameter lies, by its name without prefix.

    Raises:
        CheckpointError: an absent array, one of another type or length, or a newer format.
    """
    values = Values(file.metadata, str(file.path))
    version = values.integer(FORMAT_KEY, FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file.path} has the {FORMAT_KEY} {version}, this clover-local reads "
            f"{FORMAT_VERSION}: install a newer clover-local"
        )
    places = {}
    for layer in gdn_layers(config):
        for family, template in FAMILIES.items():
            key, shape = array_key(family, layer), PARAMETERS[template].shape(config)
            array = file.metadata[key] if key in values else values.floats(key)
            if (
                not isinstance(array, np.ndarray)
                or array.dtype != np.dtype("<f4")
                or array.size != prod(shape)
            ):
                raise CheckpointError(
                    f"{file.path}: {key} is no float32 array of {list(shape)}: use the files of "
                    "one and the same model"
                )
            start = file.array_starts[key]
            places[template.format(layer=layer)] = TensorInfo(
                key, "F32", shape, file.path, start, array.nbytes
            )
    return places


def _sizes(config: ModelConfig) -> list[int]:
    c = config
    return [
        c.vocab_size,
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
        c.num_experts,
        c.moe_intermediate_size,
        c.shared_expert_intermediate_size,
    ]


def _samples(config: ModelConfig, read: Callable[[str], Floats]) -> list[Floats]:
    layers = gdn_layers(config)
    return [
        read(name.format(layer=layer)).ravel()[:_SAMPLES]
        for layer in sorted({*layers[:1], *layers[-1:]})
        for name in _SAMPLED
    ]
