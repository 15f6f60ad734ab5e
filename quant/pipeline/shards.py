"""A quantized layer as the tensors of its shard, in the order of their bytes."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from clover_local.checkpoint.parameters import EMBEDDING, EXPERT, HEAD
from clover_local.checkpoint.write import (
    NamedTensor,
    PackedTensors,
    expert_tensors,
    weight_tensors,
)
from clover_local.kernels.packed import PackedWeight, Weight


def layer_tensors(
    layer: int,
    trunk: Mapping[str, Weight],
    *,
    experts: Iterable[tuple[Weight, Weight]],
    prefix: str,
) -> list[NamedTensor]:
    """The tensors of a decoder layer.

    Args:
        trunk: by name without prefix.
        experts: (gate_up [2F, D], down [D, F]) in order.
        prefix: of the names in the file.
    """
    parts = []
    for expert, (gate_up, down) in enumerate(experts):
        gate, up = halves(gate_up)
        name = prefix + EXPERT.format(layer=layer, expert=expert)
        parts.append(expert_tensors(name, gate, up=up, down=down))
    parts += [_named(prefix + name, weight) for name, weight in trunk.items()]
    return _in_order(parts)


def outer_tensors(outer: Mapping[str, Weight], *, prefix: str) -> list[NamedTensor]:
    """Embedding, norm and head; a head that is the embedding itself is not written."""
    tied = outer.get(HEAD) is outer[EMBEDDING]
    return _in_order(
        [
            _named(name if name == HEAD else prefix + name, weight)
            for name, weight in outer.items()
            if not (tied and name == HEAD)
        ]
    )


def halves(weight: Weight) -> tuple[Weight, Weight]:
    """The upper and the lower half of the rows: gate and up."""
    if isinstance(weight, Tensor):
        gate, up = weight.chunk(2)
        return gate, up
    middle = weight.shape[0] // 2
    return weight.rows(slice(middle)), weight.rows(slice(middle, None))


def _in_order(parts: list[PackedTensors]) -> list[NamedTensor]:
    main = [tensor for part in parts for tensor in part.main]
    return main + [tensor for part in parts for tensor in part.last]


def _named(name: str, weight: Weight) -> PackedTensors:
    if isinstance(weight, PackedWeight):
        return weight_tensors(name.removesuffix(".weight"), weight)
    return PackedTensors((NamedTensor(name, weight),))
