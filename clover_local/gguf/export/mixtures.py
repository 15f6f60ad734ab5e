"""Which type each tensor gets in a file of a given type: llama-quantize's rules, tensor by tensor.

After `llama_tensor_get_type_impl` and `tensor_type_fallback` in llama.cpp's `llama-quant.cpp`
(build 11434), for an architecture with experts that is no Falcon and no 70B. So the file has the
types, and the size, that a llama.cpp user expects of its name.
"""

from dataclasses import dataclass

from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.gguf.tensors import NamedEntry
from clover_local.gguf.types import TYPES, TensorType

# Name of a file's type: the type of most tensors, and the number for `general.file_type`.
FILE_TYPES = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q8_0": ("Q8_0", 7),
    "Q6_K": ("Q6_K", 18),
    "Q5_K_M": ("Q5_K", 17),
    "Q4_K_M": ("Q4_K", 15),
    "Q4_0": ("Q4_0", 2),
    "IQ4_XS": ("IQ4_XS", 30),
    "Q3_K_M": ("Q3_K", 12),
}
PRESETS = {"clover-q4": "Q4_K_M"}
_FLOATS = ("F32", "F16", "BF16")
_KEPT_AT_Q8 = ("attn_", "ssm_", "_shexp.")  # by clover-q4: the most sensitive matrices
_FALLBACKS = {  # where a row is no multiple of 256
    "IQ4_XS": "IQ4_NL",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
_MIXTRAL = 8  # experts: a model that llama-quantize takes for one


@dataclass(frozen=True)
class Mixture:
    """A file's type: `preset` overrides some tensors; an imatrix changes what some types do."""

    file_type: str
    preset: str | None = None
    has_imatrix: bool = False

    @property
    def number(self) -> int:
        """For `general.file_type`."""
        return FILE_TYPES[self.file_type][1]


def mixture(file_type: str | None, preset: str | None, *, has_imatrix: bool) -> Mixture:
    """What `--type` and `--preset` ask for; a preset has its own type.

    Raises:
        SettingsError: an unknown name, or a type that contradicts the preset.
    """
    if preset is not None and preset not in PRESETS:
        raise SettingsError(f"--preset {preset} is unknown: use {' or '.join(PRESETS)}")
    name = file_type.upper() if file_type is not None else PRESETS.get(preset or "", "Q4_K_M")
    if name not in FILE_TYPES:
        raise SettingsError(f"--type {file_type} is unknown: use one of {', '.join(FILE_TYPES)}")
    if preset is not None and name != PRESETS[preset]:
        raise SettingsError(
            f"--preset {preset} is made from {PRESETS[preset]}: leave --type {file_type} out"
        )
    return Mixture(name, preset, has_imatrix)


def tensor_type(named: NamedEntry, mix: Mixture, config: ModelConfig) -> TensorType:
    """The type of one tensor."""
    wanted, _ = FILE_TYPES[mix.file_type]
    if named.entry.float32:
        return TYPES["F32"]
    if wanted in _FLOATS:
        return TYPES[wanted]
    name = _by_role(named, wanted, mix, config)
    if mix.preset and any(part in named.name for part in _KEPT_AT_Q8):
        name = "Q8_0"
    return _fitting(TYPES[name], named.shape[-1])


def _fitting(kind: TensorType, columns: int) -> TensorType:
    if columns % kind.block:
        kind = TYPES[_FALLBACKS.get(kind.name, "F16")]
    return TYPES["F16"] if columns % kind.block else kind


def _by_role(named: NamedEntry, wanted: str, mix: Mixture, config: ModelConfig) -> str:
    name, file_type = named.name, mix.file_type
    layer, layers = named.layer or 0, config.num_hidden_layers
    if name == "output.weight" or (config.tie_word_embeddings and name == "token_embd.weight"):
        if named.shape[-1] % TYPES[wanted].block:
            return "Q8_0"
        return wanted if wanted == "Q8_0" else "Q6_K"
    if "attn_qkv." in name or "attn_v." in name:
        # One of the two is in every layer, so the count that llama-quantize keeps is the layer.
        if config.num_experts == _MIXTRAL:
            return "Q8_0"
        return _of_values(file_type, layer, layers, config) or wanted
    if "attn_k." in name and config.num_experts == _MIXTRAL:
        return "Q8_0"
    if "ffn_down" in name:
        return _of_down(mix, layer, layers) or wanted
    if "attn_output." in name:
        if config.num_experts == _MIXTRAL:
            return "Q5_K" if file_type in ("Q3_K_M", "Q4_K_M", "IQ4_XS") else wanted
        return "Q4_K" if file_type == "Q3_K_M" else wanted
    return wanted


def _of_values(file_type: str, layer: int, layers: int, config: ModelConfig) -> str | None:
    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    if file_type == "Q3_K_M":
        return "Q5_K" if layer < 2 else "Q4_K"
    if file_type == "IQ4_XS" and queries_per_key >= 4:
        return "Q5_K"
    if file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, layers):
        return "Q6_K"
    return None


def _of_down(mix: Mixture, layer: int, layers: int) -> str | None:
    if mix.file_type == "Q3_K_M":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mix.file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, layers):
        return "Q6_K"
    early = layer < layers // 8
    if mix.file_type == "IQ4_XS" and early and not mix.has_imatrix:
        return "Q5_K"
    if mix.file_type == "Q4_0" and early and mix.has_imatrix:
        return "Q4_1"
    return None


def _more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
