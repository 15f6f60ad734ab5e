"""Which GGUF tensor is which parameter, and how values and heads differ: needs no torch.

The one place that knows GGUF tensor names. They are those of llama.cpp's architecture `qwen35moe`
(`clover-moe` has the same), whose graph wants:

    norms   times w, not 1 + w; the decay -exp(A_log) itself
    heads   value heads tiled: head i of key head j stands at i * key heads + j, here at
            j * (value heads a key head) + i; rows of qkv, z, a, b, A_log, dt_bias, conv1d, columns
            of out_proj
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from clover_local.checkpoint.parameters import EMBEDDING, EXPERT, GATE_UP, HEAD, PARAMETERS
from clover_local.config import ModelConfig

FUSED_GATE_UP = "blk.{layer}.ffn_gate_up_exps.weight"  # some files have it instead of two

Shape = tuple[int, ...]


class Value(Enum):
    """What the file holds instead of the parameter's numbers."""

    SAME = auto()
    PLUS_ONE = auto()
    MINUS_EXP = auto()


class Heads(Enum):
    """Along which axis value heads lie, and how much of it one head is."""

    NONE = auto()
    ONE_ROW = auto()
    ROWS = auto()
    ROWS_BEHIND_KEYS = auto()  # queries and keys before them stay
    COLUMNS = auto()


@dataclass(frozen=True)
class Entry:
    """A GGUF tensor, and the parameter that it holds, by their templates."""

    name: str
    parameter: str
    value: Value = Value.SAME
    heads: Heads = Heads.NONE
    float32: bool = False  # in files of any type

    @property
    def of_experts(self) -> bool:
        """Whether it holds a matrix of every expert."""
        return bool(PARAMETERS[self.parameter].rows_of)

    def shape(self, config: ModelConfig) -> Shape:
        """Slowest first; the shared expert's gate is a vector here."""
        shape = PARAMETERS[self.parameter].shape(config)
        if self.of_experts:
            return (config.num_experts, *shape)
        return shape[1:] if shape[0] == 1 and len(shape) == 2 else shape

    def order(self, config: ModelConfig) -> NDArray[np.int64] | None:
        """`file[i] = parameter[order[i]]` along the heads' axis; None where nothing moves."""
        rows = {
            Heads.NONE: 0,
            Heads.ONE_ROW: 1,
            Heads.ROWS: config.linear_value_head_dim,
            Heads.ROWS_BEHIND_KEYS: config.linear_value_head_dim,
            Heads.COLUMNS: config.linear_value_head_dim,
        }[self.heads]
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        if not rows or keys == values:
            return None
        tiled = np.arange(values * rows).reshape(keys, values // keys, rows).swapaxes(0, 1).ravel()
        if self.heads is not Heads.ROWS_BEHIND_KEYS:
            return tiled
        before = 2 * keys * config.linear_key_head_dim
        return np.concatenate([np.arange(before), before + tiled])


_LAYER = "layers.{layer}."
_GDN = _LAYER + "linear_attn."
_ATTENTION = _LAYER + "self_attn."
_SHARED = _LAYER + "mlp.shared_expert."

# In the order of a file: by layer, mixer before experts, as the graph uses them.
_BEFORE = (Entry("token_embd.weight", EMBEDDING),)
_OF_LAYERS = tuple(
    Entry("blk.{layer}." + name, parameter, *rest)
    for name, parameter, *rest in (
        ("attn_norm.weight", _LAYER + "input_layernorm.weight", Value.PLUS_ONE, Heads.NONE, True),
        ("attn_qkv.weight", _GDN + "in_proj_qkv.weight", Value.SAME, Heads.ROWS_BEHIND_KEYS),
        ("attn_gate.weight", _GDN + "in_proj_z.weight", Value.SAME, Heads.ROWS),
        ("ssm_conv1d.weight", _GDN + "conv1d.weight", Value.SAME, Heads.ROWS_BEHIND_KEYS, True),
        ("ssm_alpha.weight", _GDN + "in_proj_a.weight", Value.SAME, Heads.ONE_ROW),
        ("ssm_beta.weight", _GDN + "in_proj_b.weight", Value.SAME, Heads.ONE_ROW),
        ("ssm_a", _GDN + "A_log", Value.MINUS_EXP, Heads.ONE_ROW, True),
        ("ssm_dt.bias", _GDN + "dt_bias", Value.SAME, Heads.ONE_ROW, True),
        ("ssm_norm.weight", _GDN + "norm.weight", Value.SAME, Heads.NONE, True),
        ("ssm_out.weight", _GDN + "out_proj.weight", Value.SAME, Heads.COLUMNS),
        ("attn_q.weight", _ATTENTION + "q_proj.weight"),
        ("attn_k.weight", _ATTENTION + "k_proj.weight"),
        ("attn_v.weight", _ATTENTION + "v_proj.weight"),
        ("attn_q_norm.weight", _ATTENTION + "q_norm.weight", Value.PLUS_ONE, Heads.NONE, True),
        ("attn_k_norm.weight", _ATTENTION + "k_norm.weight", Value.PLUS_ONE, Heads.NONE, True),
        ("attn_output.weight", _ATTENTION + "o_proj.weight"),
        (
            "post_attention_norm.weight",
            _LAYER + "post_attention_layernorm.weight",
            Value.PLUS_ONE,
            Heads.NONE,
            True,
        ),
        ("ffn_gate_inp.weight", _LAYER + "mlp.gate.weight", Value.SAME, Heads.NONE, True),
        ("ffn_gate_exps.weight", EXPERT + "gate_proj.weight"),
        ("ffn_up_exps.weight", EXPERT + "up_proj.weight"),
        ("ffn_down_exps.weight", EXPERT + "down_proj.weight"),
        (
            "ffn_gate_inp_shexp.weight",
            _LAYER + "mlp.shared_expert_gate.weight",
            Value.SAME,
            Heads.NONE,
            True,
        ),
        ("ffn_gate_shexp.weight", _SHARED + "gate_proj.weight"),
        ("ffn_up_shexp.weight", _SHARED + "up_proj.weight"),
        ("ffn_down_shexp.weight", _SHARED + "down_proj.weight"),
    )
)
_AFTER = (
    Entry("output_norm.weight", "norm.weight", Value.PLUS_ONE, Heads.NONE, True),
    Entry("output.weight", HEAD),
)


@dataclass(frozen=True)
class NamedEntry:
    """An entry of one layer, or of none."""

    entry: Entry
    layer: int | None
    shape: Shape

    @property
    def name(self) -> str:
        """The tensor's name in the file."""
        return self.entry.name.format(layer=self.layer)

    @property
    def parameter(self) -> str:
        """The parameter's name; with `gate_up_proj` or `down_proj` at the end for experts."""
        kind = PARAMETERS[self.entry.parameter]
        return (kind.rows_of or self.entry.parameter).format(layer=self.layer)


def named_entries(config: ModelConfig) -> Iterator[NamedEntry]:
    """Every tensor of a model, in the order of a file. A tied head is the embedding."""
    for entry in _BEFORE:
        yield NamedEntry(entry, None, entry.shape(config))
    for layer, of_type in enumerate(config.layer_types):
        for entry in _OF_LAYERS:
            if of_type in PARAMETERS[entry.parameter].layers:
                yield NamedEntry(entry, layer, entry.shape(config))
    for entry in _AFTER:
        if not (entry.parameter == HEAD and config.tie_word_embeddings):
            yield NamedEntry(entry, None, entry.shape(config))


def fused_gate_up(config: ModelConfig, layer: int) -> tuple[str, Shape]:
    """Name and shape of the tensor that may stand for an expert's gate and up together."""
    shape = PARAMETERS[GATE_UP].shape(config)
    return FUSED_GATE_UP.format(layer=layer), shape
