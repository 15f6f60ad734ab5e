"""Which tensor of a checkpoint becomes which parameter, and whether all fit; needs no torch.

`PARAMETERS` is the one place that knows tensor names. Everything is decided from the headers,
before any weight is read: a wrong checkpoint of 69 GB is refused in a second, with every complaint
at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clover_local.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from clover_local.errors import CheckpointError
from clover_local.shards import Shard, TensorInfo, abbreviated, read_shards

PREFIXES = ("model.language_model.", "model.")
FOREIGN_FAMILIES = ("mtp.", "visual.", "model.visual.")
FLOAT_DTYPES = ("BF16", "F16", "F32")

Shape = tuple[int, ...]

_EVERY = (FULL_ATTENTION, LINEAR_ATTENTION)
_ATTENTION = (FULL_ATTENTION,)
_LINEAR = (LINEAR_ATTENTION,)


@dataclass(frozen=True)
class Parameter:
    """What one tensor of the files becomes.

    `shape` is the parameter's, from the config; `layers` the types of layer that have it (none:
    once in the model). A `float32` parameter stays float32 whatever dtype the model runs in. The
    taps of a depthwise `convolution`, [C, K], may also be on disk as [C, 1, K]. A tensor of one
    expert is rows, from `first_row`, of that expert's part of the parameter `rows_of`.
    """

    shape: Callable[[ModelConfig], Shape]
    layers: tuple[str, ...] = ()
    float32: bool = False
    diffusion: bool = False
    convolution: bool = False
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


GATE_UP = "layers.{layer}.mlp.experts.gate_up_proj"
DOWN = "layers.{layer}.mlp.experts.down_proj"
EXPERT = "layers.{layer}.mlp.experts.{expert}."

PARAMETERS: dict[str, Parameter] = {
    "embed_tokens.weight": Parameter(_embedding),
    "norm.weight": Parameter(_hidden, float32=True),
    "lm_head.weight": Parameter(_embedding),
    "layers.{layer}.input_layernorm.weight": Parameter(_hidden, _EVERY, float32=True),
    "layers.{layer}.post_attention_layernorm.weight": Parameter(_hidden, _EVERY, float32=True),
    "layers.{layer}.linear_attn.in_proj_qkv.weight": Parameter(
        lambda c: (c.qkv_dim, c.hidden_size), _LINEAR
    ),
    "layers.{layer}.linear_attn.in_proj_z.weight": Parameter(
        lambda c: (c.linear_num_value_heads * c.linear_value_head_dim, c.hidden_size), _LINEAR
    ),
    "layers.{layer}.linear_attn.in_proj_a.weight": Parameter(_gate_per_head, _LINEAR),
    "layers.{layer}.linear_attn.in_proj_b.weight": Parameter(_gate_per_head, _LINEAR),
    "layers.{layer}.linear_attn.conv1d.weight": Parameter(
        lambda c: (c.qkv_dim, c.linear_conv_kernel_dim), _LINEAR, float32=True, convolution=True
    ),
    "layers.{layer}.linear_attn.A_log": Parameter(_value_heads, _LINEAR, float32=True),
    "layers.{layer}.linear_attn.dt_bias": Parameter(_value_heads, _LINEAR, float32=True),
    "layers.{layer}.linear_attn.norm.weight": Parameter(
        lambda c: (c.linear_value_head_dim,), _LINEAR, float32=True
    ),
    "layers.{layer}.linear_attn.out_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.linear_num_value_heads * c.linear_value_head_dim), _LINEAR
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
        lambda c: (2 * c.num_attention_heads * c.head_dim, c.hidden_size), _ATTENTION
    ),
    "layers.{layer}.self_attn.k_proj.weight": Parameter(_key_value, _ATTENTION),
    "layers.{layer}.self_attn.v_proj.weight": Parameter(_key_value, _ATTENTION),
    "layers.{layer}.self_attn.o_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.num_attention_heads * c.head_dim), _ATTENTION
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
        lambda c: (c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size), _EVERY
    ),
    DOWN: Parameter(lambda c: (c.num_experts, c.hidden_size, c.moe_intermediate_size), _EVERY),
    EXPERT + "gate_proj.weight": Parameter(_expert_in, _EVERY, rows_of=GATE_UP),
    EXPERT + "up_proj.weight": Parameter(
        _expert_in, _EVERY, rows_of=GATE_UP, first_row=lambda c: c.moe_intermediate_size
    ),
    EXPERT + "down_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.moe_intermediate_size), _EVERY, rows_of=DOWN
    ),
    "layers.{layer}.mlp.shared_expert.gate_proj.weight": Parameter(_shared_in, _EVERY),
    "layers.{layer}.mlp.shared_expert.up_proj.weight": Parameter(_shared_in, _EVERY),
    "layers.{layer}.mlp.shared_expert.down_proj.weight": Parameter(
        lambda c: (c.hidden_size, c.shared_expert_intermediate_size), _EVERY
    ),
    "layers.{layer}.mlp.shared_expert_gate.weight": Parameter(lambda c: (1, c.hidden_size), _EVERY),
}


@dataclass(frozen=True)
class Target:
    """A place for one tensor: the parameter `name`, or rows of one expert's part of it."""

    name: str
    kind: Parameter
    shape: Shape
    expert: int | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Placement:
    """One tensor of the files and the place where it goes."""

    tensor: TensorInfo
    target: Target


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a model, matched with its config.

    `placements` are in the order of the bytes on disk. `problems` is empty when everything fits;
    `notes` are for the user. Without diffusion parameters only the mode `ar` works.
    """

    folder: Path
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    placements: tuple[Placement, ...]
    has_diffusion: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def require_fit(self) -> None:
        """Raises CheckpointError with every problem, if there is one."""
        if self.problems:
            raise CheckpointError(
                f"{self.folder}: the weights do not fit config.json: {'; '.join(self.problems)}: "
                "use the files of one and the same checkpoint"
            )


@dataclass(frozen=True)
class ParameterCount:
    """Numbers in a model: all, and those that one token is multiplied with.

    Looking up an embedding is no multiplication: that table counts only where it is the head too.
    """

    total: int
    active: int


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Reads the headers of all weight files and matches them with `config`; reads no weights.

    Raises:
        CheckpointError: missing or damaged files. Tensors that do not fit are no error here: they
            are `problems`.
    """
    shards = read_shards(folder)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    foreign = [name for name in tensors if name.startswith(FOREIGN_FAMILIES)]
    prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in tensors), PREFIXES[-1])
    first_expert = prefix + EXPERT.format(layer=0, expert=0)
    per_expert = any(name.startswith(first_expert) for name in tensors)
    wanted = dict(_targets(config, prefix=prefix, per_expert=per_expert))
    has_diffusion = any(target.kind.diffusion for name, target in wanted.items() if name in tensors)
    if not has_diffusion:
        wanted = {name: target for name, target in wanted.items() if not target.kind.diffusion}
    if config.tie_word_embeddings and "lm_head.weight" not in tensors:
        del wanted["lm_head.weight"]
    placements = tuple(
        Placement(tensor, wanted[tensor.name])
        for shard in shards
        for tensor in shard.tensors
        if tensor.name in wanted
    )
    notes = []
    if foreign:
        notes.append(f"skipped {len(foreign)} tensors of other parts ({abbreviated(foreign)})")
    if not has_diffusion:
        notes.append("no diffusion parameters in these weights: only the mode ar works")
    return Checkpoint(
        folder=folder,
        shards=shards,
        tensors=tensors,
        placements=placements,
        has_diffusion=has_diffusion,
        notes=tuple(notes),
        problems=_problems(
            missing=[name for name in wanted if name not in tensors],
            surplus=sorted(tensors.keys() - wanted.keys() - set(foreign)),
            placements=placements,
        ),
    )


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter's name and shape, the fused experts among them."""
    return {
        target.name: target.shape for _, target in _targets(config, prefix="", per_expert=False)
    }


def count_parameters(config: ModelConfig, *, diffusion: bool) -> ParameterCount:
    """How many numbers a model of this config has, with or without the diffusion parameters."""
    sizes = {
        name: math.prod(target.shape)
        for name, target in _targets(config, prefix="", per_expert=False)
        if diffusion or not target.kind.diffusion
    }
    embedding = sizes["embed_tokens.weight"]
    if config.tie_word_embeddings:
        del sizes["lm_head.weight"]
    total = sum(sizes.values())
    one_expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * one_expert
    return ParameterCount(total, total - idle - (0 if config.tie_word_embeddings else embedding))


def _targets(config: ModelConfig, *, prefix: str, per_expert: bool) -> Iterator[tuple[str, Target]]:
    """Every tensor name that the files should hold, with the place of that tensor."""
    for template, kind in PARAMETERS.items():
        if template in (GATE_UP, DOWN) if per_expert else kind.rows_of:
            continue
        path = template if template == "lm_head.weight" else prefix + template
        layers = [i for i, of_type in enumerate(config.layer_types) if of_type in kind.layers]
        experts = range(config.num_experts) if kind.rows_of else (None,)
        shape, first_row = kind.shape(config), kind.first_row(config)
        for layer in layers if kind.layers else (None,):
            name = (kind.rows_of or template).format(layer=layer)
            for expert in experts:
                target = Target(name, kind, shape, expert, first_row)
                yield path.format(layer=layer, expert=expert), target


def _problems(
    *, missing: list[str], surplus: list[str], placements: tuple[Placement, ...]
) -> tuple[str, ...]:
    misshapen = []
    for placement in placements:
        tensor, target = placement.tensor, placement.target
        shapes = [target.shape]
        if target.kind.convolution:
            shapes.append((target.shape[0], 1, target.shape[1]))
        if tensor.dtype not in FLOAT_DTYPES:
            misshapen.append(
                f"{tensor.name} is {tensor.dtype}, expected {' or '.join(FLOAT_DTYPES)}"
            )
        elif tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            misshapen.append(f"{tensor.name} is {list(tensor.shape)}, expected {expected}")
    return tuple(
        f"{len(names)} {what} ({abbreviated(names)})"
        for what, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    )
