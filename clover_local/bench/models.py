"""Random models in the real model's shapes, and what a model's weights take in memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from clover_local.bench.floor import Widths
from clover_local.checkpoint.parameters import HEAD, targets
from clover_local.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.model.attention import Attention
from clover_local.model.clover import Clover
from clover_local.model.linear import Linear

if TYPE_CHECKING:  # Triton is loaded where there is a GPU
    from clover_local.kernels.gpu.experts.record import ExpertSlots

Weights = Literal["float32", "int4"]


def real_layers(
    *, layers: int = 4, experts: int = 64, vocabulary: int = 32768, context: int = 4096
) -> ModelConfig:
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
        max_position_embeddings=context,
        block_size=32,
        mask_token_id=vocabulary - 1,
        threshold=0.95,
        coreset_enabled=False,
        coreset_top_p=1.0,
        eos_token_id=(0,),
        pad_token_id=None,
        dtype="float32",
    )


def random_model(
    config: ModelConfig,
    *,
    weights: Weights = "float32",
    head_bits: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Clover:
    """A model with random weights, made where they will lie, the experts layer by layer.

    `int4`: experts of 4 bits in groups of 128, the head of `head_bits`, the other products but the
    router's of 8 bits in groups of 64 (or smaller groups that fit); everything else `dtype`.
    """
    device = torch.device(device)
    generator = None  # a tensor without memory takes no draws
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(seed)
    draw = partial(_draw, generator=generator, device=device, dtype=dtype)

    def layers() -> Iterator[tuple[list[Weight], list[Weight]]]:
        d, f = config.hidden_size, config.moe_intermediate_size
        bits = 4 if weights == "int4" else None
        every = range(config.num_experts)
        for _ in range(config.num_hidden_layers):
            gate_up = [draw((2 * f, d), bits=bits) for _ in every]
            yield gate_up, [draw((d, f), bits=bits) for _ in every]

    def bits_of(name: str, packable: bool) -> int | None:
        if not packable or weights != "int4":
            return None
        return head_bits if name == HEAD else 8

    return Clover(
        config,
        {
            name: draw(target.shape, bits=bits_of(name, target.kind.packable))
            for name, target in targets(config, prefix="", per_expert=False)
            if not target.kind.fused
        },
        experts=ResidentExperts(layers()),
        device=device,
        dtype=dtype,
    )


def _draw(
    shape: tuple[int, ...],
    *,
    bits: int | None,
    generator: torch.Generator | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Weight:
    """A weight of `bits`, or one that is not packed."""
    if bits is not None:
        return random_packed(shape, bits=bits, generator=generator, device=device)
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, scale, generator=generator)


def random_packed(
    shape: tuple[int, ...],
    *,
    bits: int,
    generator: torch.Generator | None,
    device: torch.device | str = "cpu",
) -> PackedWeight:
    """A packed weight [N, K] whose numbers have the deviation K^-0.5; symmetric, bfloat16 scales.

    Groups of 128 with 4 bits and of 64 with 8, or the largest smaller ones that fit.
    """
    rows, columns = shape
    words, group_size = columns * bits // 32, math.gcd(columns, 128 if bits == 4 else 64)
    # Evenly spread integers have a deviation of 2^bits / sqrt(12).
    scale = (12 / columns) ** 0.5 / (1 << bits)
    data = torch.empty(rows, words, dtype=torch.int32, device=device)
    return PackedWeight(
        data.random_(-(1 << 31), 1 << 31, generator=generator),
        torch.full((rows, columns // group_size), scale, dtype=torch.bfloat16, device=device),
        None,
        bits,
        group_size,
    )


def widths(model: Clover) -> Widths:
    """Those of a model's weights as they are in memory."""
    config = model.config
    shared = [layer.moe.shared.slots for layer in model.layers]
    return Widths(
        trunk=_width(
            (weight for linear in trunk(model) for weight in linear.weights),
            slots=[slots for slots in shared if slots is not None],
        ),
        experts=_width(
            expert_weights(model), slots=_resident(model).slots, experts=config.num_experts
        ),
        head=_width(model.head.lm_head.weights),
        cache=model.dtype.itemsize,
    )


def trunk(model: Clover) -> list[Linear]:
    """The products of all layers but routers, routed experts, and shared ones in slots."""
    products: list[Linear] = []
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            products += [mixer.qkv_proj, mixer.o_proj]
        else:
            products += [mixer.in_proj, mixer.out_proj]
        products += layer.moe.shared.linears
    return products


def expert_weights(model: Clover) -> list[Weight]:
    """The matrices of all routed experts that are not in slots.

    Raises:
        ValueError: they are not resident.
    """
    return _resident(model).weights


def _resident(model: Clover) -> ResidentExperts:
    experts = model.layers[0].moe.experts
    if not isinstance(experts, ResidentExperts):
        raise ValueError(f"the experts are {type(experts).__name__}, the bench needs them resident")
    return experts


def _width(
    weights: Iterable[Weight], *, slots: "Sequence[ExpertSlots]" = (), experts: int = 1
) -> float:
    """Bytes of a number: of weights, and of slots that hold `experts` each."""
    bytes_and_numbers = [
        (w.nbytes, math.prod(w.shape))
        if isinstance(w, PackedWeight)
        else (w.numel() * w.element_size(), w.numel())
        for w in weights
    ]
    bytes_and_numbers += [
        (experts * layer.layout.nbytes, experts * 3 * layer.layout.hidden * layer.layout.inner)
        for layer in slots
    ]
    return sum(b for b, _ in bytes_and_numbers) / sum(n for _, n in bytes_and_numbers)
