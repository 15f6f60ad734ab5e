"""Which parameters a model has: names on disk, shapes, and how many numbers; needs no torch.

`PARAMETERS` is the one place that knows tensor names.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clover_local.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig

PREFIXES = ("model.language_model.", "model.")

Shape = tuple[int, ...]

_EVERY = (FULL_ATTENTION, LINEAR_ATTENTION)
_ATTENTION = (FULL_ATTENTION,)
_LINEAR = (LINEAR_ATTENTION,)


@dataclass(frozen=True)
class Parameter:
    """What one tensor of the files becomes.

    `shape` is the parameter's, from the config; `layers` the types of layer that have it (none:
    once in the model). A `float32` parameter stays float32 whatever dtype the model runs in. The
    taps of a depthwise `convolution`, [C, K], may also be on disk as [C, 1, K]. A `packable` matrix
    may be integers with scales. A `fused` tensor is that of all experts of a layer; a tensor of one
    expert is rows, from `first_row`, of that expert's part of the parameter `rows_of`.
    """

    shape: Callable[[ModelConfig], Shape]
    layers: tuple[str, ...] = ()
    float32: bool = False
    diffusion: bool = False
    convolution: bool = False
    packable: bool = False
    fused: bool = False
    rows_of: str = ""
    first_row: Callable[[ModelConfig], int] = lambda config: 0


def _hidden(config: ModelConfig) -> Shape:
    return (config.hidden_size,)


def _embedding(config: ModelConfig) -> Shape:
    return (config.vocab_size, config.hidden_size)


def _value_heads(config: ModelConfig) -> Shape:
    return (config.linear_num_value_heads,)


def _gate_per_head(config: ModelConfig) -> Shape:
    return (config.linear_num_value_heads, config.hidden_size)


def _key_value(config: ModelConfig) -> Shape:
    return (config.num_key_value_heads * config.head_dim, config.hidden_size)


def _expert_in(config: ModelConfig) -> Shape:
    return (config.moe_intermediate_size, config.hidden_size)


def _shared_in(config: ModelConfig) -> Shape:
    return (config.shared_expert_intermediate_size, config.hidden_size)


EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
GATE_UP = "layers.{layer}.mlp.experts.gate_up_proj"
DOWN = "layers.{layer}.mlp.experts.down_proj"
EXPERT = "layers.{layer}.mlp.experts.{expert}."

PARAMETERS: dict[str, Parameter] = {
    EMBEDDING: Parameter(_embedding),
    "norm.weight": Parameter(_hidden, float32=True),
    HEAD: Parameter(_embedding, packable=True),
    "layers.{layer}.input_layernorm.weight": Parameter(_hidden, _EVERY, float32=True),
    "layers.{layer}.post_attention_layernorm.weight": Parameter(_hidden, _EVERY, float32=True),
    "layers.{layer}.linear_attn.in_proj_qkv.weight": Parameter(
        lambda c: (c.qkv_dim, c.hidden_size), _LINEAR, packable=True
    ),
    "layers.{layer}.linear_attn.in_proj_z.weight": Parameter(
        lambda c: (c.linear_num_value_heads * c.linear_value_head_dim, c.hidden_size),
        _LINEAR,
        packable=True,
    ),
    "layers.{layer}.linear_attn.in_proj_a.weight": Parameter(
        _gate_per_head, _LINEAR, packable=True
    ),
    "layers.{layer}.linear_attn.in_proj_b.weight": Parameter(
        _gate_per_head, _LINEAR, packable=True
    ),
    "layers.{layer}.linear_attn.conv1d.weight": Parameter(
        lambda c: (c.qkv_dim, c.linear_conv_kernel_dim), _LINEAR, float32=True, convolution=True
    ),
    "layers.{layer}.linear_attn.A_log": Parameter(_value_heads, _LINEAR, float32=True),
    "layers.{layer}.linear_attn.dt_bias": Parameter(_value_heads, _LINEAR, float32=True),
    "layers.{layer}.linear_attn.norm.weight": Parameter(
        lambda c: (c.linear_value_head_dim,), _LINEAR, float32=True
    ),
    "layers.{layer}.linear_attn.out_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.linear_num_value_heads * c.linear_value_head_dim),
        _LINEAR,
        packable=True,
    ),
    "layers.{layer}.linear_attn.conv_right_weight": Parameter(
        lambda c: (c.qkv_dim, c.linear_conv_kernel_dim - 1),
        _LINEAR,
        float32=True,
        diffusion=True,
        convolution=True,
    ),
    "layers.{layer}.linear_attn.bd_softmax_logit_scale": Parameter(
        _value_heads, _LINEAR, float32=True, diffusion=True
    ),
    "layers.{layer}.linear_attn.bd_softmax_history_bias": Parameter(
        _value_heads, _LINEAR, float32=True, diffusion=True
    ),
    "layers.{layer}.linear_attn.bd_softmax_history_c": Parameter(
        _value_heads, _LINEAR, float32=True, diffusion=True
    ),
    "layers.{layer}.self_attn.q_proj.weight": Parameter(
        lambda c: (2 * c.num_attention_heads * c.head_dim, c.hidden_size), _ATTENTION, packable=True
    ),
    "layers.{layer}.self_attn.k_proj.weight": Parameter(_key_value, _ATTENTION, packable=True),
    "layers.{layer}.self_attn.v_proj.weight": Parameter(_key_value, _ATTENTION, packable=True),
    "layers.{layer}.self_attn.o_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.num_attention_heads * c.head_dim), _ATTENTION, packable=True
    ),
    "layers.{layer}.self_attn.q_norm.weight": Parameter(
        lambda c: (c.head_dim,), _ATTENTION, float32=True
    ),
    "layers.{layer}.self_attn.k_norm.weight": Parameter(
        lambda c: (c.head_dim,), _ATTENTION, float32=True
    ),
    "layers.{layer}.mlp.gate.weight": Parameter(
        lambda c: (c.num_experts, c.hidden_size), _EVERY, float32=True
    ),
    GATE_UP: Parameter(
        lambda c: (c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size), _EVERY, fused=True
    ),
    DOWN: Parameter(
        lambda c: (c.num_experts, c.hidden_size, c.moe_intermediate_size), _EVERY, fused=True
    ),
    EXPERT + "gate_proj.weight": Parameter(_expert_in, _EVERY, packable=True, rows_of=GATE_UP),
    EXPERT + "up_proj.weight": Parameter(
        _expert_in,
        _EVERY,
        packable=True,
        rows_of=GATE_UP,
        first_row=lambda c: c.moe_intermediate_size,
    ),
    EXPERT + "down_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.moe_intermediate_size), _EVERY, packable=True, rows_of=DOWN
    ),
    "layers.{layer}.mlp.shared_expert.gate_proj.weight": Parameter(
        _shared_in, _EVERY, packable=True
    ),
    "layers.{layer}.mlp.shared_expert.up_proj.weight": Parameter(_shared_in, _EVERY, packable=True),
    "layers.{layer}.mlp.shared_expert.down_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.shared_expert_intermediate_size), _EVERY, packable=True
    ),
    "layers.{layer}.mlp.shared_expert_gate.weight": Parameter(lambda c: (1, c.hidden_size), _EVERY),
}


_LAYER = re.compile(r"^layers\.\d+\.")


def kind_of(name: str) -> Parameter:
    """What `PARAMETERS` says of a parameter, by its name without prefix and of any layer."""
    return PARAMETERS[_LAYER.sub("layers.{layer}.", name)]


@dataclass(frozen=True)
class Target:
    """A place for one tensor: the parameter `name`, or rows of one expert's part of it."""

    name: str
    kind: Parameter
    shape: Shape
    expert: int | None = None
    first_row: int = 0

    @property
    def shapes_on_disk(self) -> tuple[Shape, ...]:
        """Those that the tensor may have in the files."""
        if self.kind.convolution:
            return self.shape, (self.shape[0], 1, self.shape[1])
        return (self.shape,)


@dataclass(frozen=True)
class ParameterCount:
    """Numbers in a model: all, and those that one token is multiplied with.

    Looking up an embedding is no multiplication: that table counts only where it is the head too.
    """

    total: int
    active: int


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter's name and shape, the fused experts among them."""
    return {target.name: target.shape for _, target in targets(config, prefix="", per_expert=False)}


def count_parameters(config: ModelConfig, *, diffusion: bool) -> ParameterCount:
    """How many numbers a model of this config has, with or without the diffusion parameters."""
    sizes = {
        name: math.prod(target.shape)
        for name, target in targets(config, prefix="", per_expert=False)
        if diffusion or not target.kind.diffusion
    }
    embedding = sizes[EMBEDDING]
    if config.tie_word_embeddings:
        del sizes[HEAD]
    total = sum(sizes.values())
    one_expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * one_expert
    return ParameterCount(total, total - idle - (0 if config.tie_word_embeddings else embedding))


def targets(config: ModelConfig, *, prefix: str, per_expert: bool) -> Iterator[tuple[str, Target]]:
    """Every tensor name that the files should hold, with the place of that tensor."""
    for template, kind in PARAMETERS.items():
        if kind.fused if per_expert else kind.rows_of:
            continue
        path = template if template == HEAD else prefix + template
        layers = [i for i, of_type in enumerate(config.layer_types) if of_type in kind.layers]
        experts = range(config.num_experts) if kind.rows_of else (None,)
        shape, first_row = kind.shape(config), kind.first_row(config)
        for layer in layers if kind.layers else (None,):
            name = (kind.rows_of or template).format(layer=layer)
            for expert in experts:
                target = Target(name, kind, shape, expert, first_row)
                yield path.format(layer=layer, expert=expert), target
