"""How long a forward takes beside the least it could take on this machine, measured in one run.

The floor of an operator is max(bytes / read rate, FLOPs / matmul rate): the bytes it has to read
(weights of the experts in use, state, keys and values) at the rate at which this machine reads a
large tensor, the FLOPs at the rate of a 2048-cube float32 product. A forward's floor is the sum
over its operators. Both rates are measured in the same run, between the forwards, so that a ratio
holds while the machine's speed drifts.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.parameters import DOWN, GATE_UP, parameter_shapes
from clover_local.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from clover_local.experts import ResidentExperts
from clover_local.model.clover import Clover, PassOutput

CUBE = 2048  # of the reference product
READ_BYTES = 1 << 29  # of the tensor whose read rate counts
PREFIX_ROWS = 256  # committed before the forwards
COMMIT_ROWS = 32


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
class Forward:
    """One kind of forward: median time, floor, and what the floor is made of."""

    name: str
    rows: int
    distinct_experts: float  # a layer
    milliseconds: float
    floor_milliseconds: float
    operators: tuple[Operator, ...]

    @property
    def ratio(self) -> float:
        """Time by floor; 1 is perfect."""
        return self.milliseconds / self.floor_milliseconds


@dataclass(frozen=True)
class Report:
    """All forwards, and the rates that their floors rest on."""

    rates: Rates
    threads: int
    forwards: tuple[Forward, ...]

    def to_json(self) -> dict[str, object]:
        """For `bench --json`; rates in GB/s and GFLOP/s."""
        return {
            "read_gb_per_second": self.rates.bytes_per_second / 1e9,
            "matmul_gflop_per_second": self.rates.flops_per_second / 1e9,
            "threads": self.threads,
            "forwards": [
                {
                    "name": f.name,
                    "rows": f.rows,
                    "distinct_experts_per_layer": f.distinct_experts,
                    "ms": f.milliseconds,
                    "floor_ms": f.floor_milliseconds,
                    "ratio": f.ratio,
                    "operators": [
                        {"name": o.name, "bytes": o.bytes, "flops": o.flops} for o in f.operators
                    ],
                }
                for f in self.forwards
            ],
        }


def real_layers(*, layers: int = 4, experts: int = 64, vocabulary: int = 32768) -> ModelConfig:
    """The real model's layer shapes with fewer layers, experts and words."""
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        num_hidden_layers=layers,
        layer_types=tuple(
            FULL_ATTENTION if (layer + 1) % 4 == 0 else LINEAR_ATTENTION for layer in range(layers)
        ),
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        block_size=32,
        mask_token_id=vocabulary - 1,
        threshold=0.95,
        coreset_enabled=False,
        coreset_top_p=1.0,
        eos_token_id=(0,),
        pad_token_id=None,
        dtype="float32",
    )


def random_model(config: ModelConfig, *, seed: int = 0) -> Clover:
    """A model with random float32 weights on the CPU; experts are made layer by layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        return torch.empty(shape).normal_(0.0, scale, generator=generator)

    shapes = parameter_shapes(config)
    experts = [
        (shapes.pop(GATE_UP.format(layer=layer)), shapes.pop(DOWN.format(layer=layer)))
        for layer in range(config.num_hidden_layers)
    ]

    def layers() -> Iterator[tuple[Tensor, Tensor]]:
        for gate_up, down in experts:
            yield draw(gate_up), draw(down)

    return Clover(
        config,
        {name: draw(shape) for name, shape in shapes.items()},
        experts=ResidentExperts(layers()),
        device="cpu",
        dtype=torch.float32,
    )


def operators(
    config: ModelConfig, *, rows: int, committed: int, expert_uses: int, distinct: float, width: int
) -> tuple[Operator, ...]:
    """What a forward over `rows` rows has to read and to multiply.

    Args:
        committed: tokens in the state.
        expert_uses: rows times experts a row, summed over the layers.
        distinct: experts in use, summed over the layers.
        width: bytes of a weight.
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
        name: str, count: float, outputs: int, inputs: int, *, uses: float | None = None
    ) -> Operator:
        size = outputs * inputs
        return Operator(
            name, count * size * width, 2.0 * size * (rows * count if uses is None else uses)
        )

    expert = 3 * config.moe_intermediate_size
    shared = 3 * config.shared_expert_intermediate_size
    return (
        linear("GDN projections in", gdn, gdn_in, d),
        Operator("GDN state", gdn * state * 4, gdn * 4.0 * rows * state),
        linear("GDN projection out", gdn, d, value_dim),
        linear("attention q, k, v", attention, 2 * heads + 2 * kv, d),
        Operator(
            "attention",
            attention * 2.0 * keys * kv * width,
            attention * 4.0 * rows * keys * heads,
        ),
        linear("attention out", attention, d, heads),
        linear("router", config.num_hidden_layers, config.num_experts + 1, d),
        linear("experts", distinct, expert, d, uses=expert_uses),
        linear("shared expert", config.num_hidden_layers, shared, d),
        linear("lm_head", 1, v, d),
    )


def measure(model: Clover, *, repeats: int = 7, seed: int = 0) -> Report:
    """Times a preview of a block, a commit of 32 rows and an AR token behind a short prefix."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)

    def tokens(rows: int) -> list[int]:
        ids: list[int] = torch.randint(0, config.vocab_size, (rows,), generator=generator).tolist()
        return ids

    state = SequenceState(
        config, context=config.max_position_embeddings, device=model.device, dtype=model.dtype
    )
    model.commit(tokens(PREFIX_ROWS), state)
    prefix = state.checkpoint()
    calls: dict[str, tuple[int, Callable[[list[int]], PassOutput]]] = {
        "pass": (config.block_size, lambda ids: model.preview(ids, state)),
        "commit": (COMMIT_ROWS, lambda ids: model.commit(ids, state, logits="last")),
        "AR token": (1, lambda ids: model.commit(ids, state)),
    }
    if not model.can_preview:
        del calls["pass"]
    big = torch.ones(READ_BYTES // 4)
    cube = torch.randn(CUBE, CUBE, generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in ("read", "cube", *calls)}
    outputs: dict[str, PassOutput] = {}
    for repeat in range(repeats + 1):  # the first one warms up
        for name, (rows, call) in calls.items():
            ids = tokens(rows)
            state.rewind(prefix)
            began = time.perf_counter()
            outputs[name] = call(ids)
            seconds[name].append(time.perf_counter() - began)
            for reference, work in (("read", big.sum), ("cube", partial(torch.mm, cube, cube))):
                began = time.perf_counter()
                work()
                seconds[reference].append(time.perf_counter() - began)
        if repeat == 0:
            seconds = {name: [] for name in seconds}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rates = Rates(READ_BYTES / medians["read"], 2.0 * CUBE**3 / medians["cube"])
    forwards = tuple(
        _forward(model, name, rows=rows, output=outputs[name], seconds=medians[name], rates=rates)
        for name, (rows, _) in calls.items()
    )
    return Report(rates, torch.get_num_threads(), forwards)


def _forward(
    model: Clover, name: str, *, rows: int, output: PassOutput, seconds: float, rates: Rates
) -> Forward:
    used = [ids[ids >= 0] for ids in output.expert_ids]
    distinct = sum(len(set(ids.tolist())) for ids in used)
    parts = operators(
        model.config,
        rows=rows,
        committed=PREFIX_ROWS,
        expert_uses=sum(len(ids) for ids in used),
        distinct=distinct,
        width=model.dtype.itemsize,
    )
    floor = sum(map(rates.seconds, parts))
    layers = model.config.num_hidden_layers
    return Forward(name, rows, distinct / layers, 1000 * seconds, 1000 * floor, parts)
