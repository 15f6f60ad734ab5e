"""What a forward has to read and to multiply, and the least time that takes.

The floor of an operator is max(bytes / read rate, FLOPs / matmul rate); a forward's floor is the
sum over its operators. Bytes are those of the weights of the experts in use as they are stored, of
the state, and of keys and values.
"""

from dataclasses import dataclass

from clover_local.config import ModelConfig


@dataclass(frozen=True)
class Operator:
    """One operator of a forward, summed over the layers that have it."""

    name: str
    bytes: float
    flops: float


@dataclass(frozen=True)
class Rates:
    """What this machine does at best."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, operator: Operator) -> float:
        """The least time for an operator."""
        return max(operator.bytes / self.bytes_per_second, operator.flops / self.flops_per_second)


@dataclass(frozen=True)
class Widths:
    """Bytes of a number, scales included, by what it belongs to."""

    trunk: float
    experts: float
    head: float
    cache: float
    router: float = 4.0


def operators(
    config: ModelConfig,
    *,
    rows: int,
    committed: int,
    expert_uses: int,
    distinct: float,
    widths: Widths,
) -> tuple[Operator, ...]:
    """What a forward over `rows` rows has to read and to multiply.

    Args:
        committed: tokens in the state.
        expert_uses: rows times experts a row, summed over the layers.
        distinct: experts in use, summed over the layers.
        widths: bytes of the weights.
    """
    d, v = config.hidden_size, config.vocab_size
    attention = sum(map(config.is_attention, range(config.num_hidden_layers)))
    gdn = config.num_hidden_layers - attention
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    value_dim = config.linear_num_value_heads * config.linear_value_head_dim
    state = value_dim * config.linear_key_head_dim
    gdn_in = config.qkv_dim + value_dim + 2 * config.linear_num_value_heads
    keys = committed + rows

    def linear(
        name: str,
        count: float,
        outputs: int,
        *,
        inputs: int = d,
        width: float = widths.trunk,
        uses: float | None = None,
    ) -> Operator:
        size = outputs * inputs
        return Operator(
            name, count * size * width, 2.0 * size * (rows * count if uses is None else uses)
        )

    expert = 3 * config.moe_intermediate_size
    shared = 3 * config.shared_expert_intermediate_size
    return (
        linear("GDN projections in", gdn, gdn_in),
        Operator("GDN state", gdn * state * 4, gdn * 4.0 * rows * state),
        linear("GDN projection out", gdn, d, inputs=value_dim),
        linear("attention q, k, v", attention, 2 * heads + 2 * kv),
        Operator(
            "attention",
            attention * 2.0 * keys * kv * widths.cache,
            attention * 4.0 * rows * keys * heads,
        ),
        linear("attention out", attention, d, inputs=heads),
        linear("router", config.num_hidden_layers, config.num_experts + 1, width=widths.router),
        linear("experts", distinct, expert, width=widths.experts, uses=expert_uses),
        linear("shared expert", config.num_hidden_layers, shared),
        linear("lm_head", 1, v, width=widths.head),
    )
