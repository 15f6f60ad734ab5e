"""Reads chosen parts of a checkpoint into fresh memory, in the dtypes of the files.

For work that holds one layer at a time: nothing is mapped, so that memory is what the caller keeps.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clover_local.checkpoint.packed import PackedInfo
from clover_local.checkpoint.parameters import DOWN, EMBEDDING, GATE_UP, HEAD
from clover_local.checkpoint.placements import Checkpoint, Placement
from clover_local.checkpoint.shards import TensorInfo
from clover_local.checkpoint.zero_points import packed_minimum
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError
from clover_local.kernels.packed import PackedWeight, Weight, stack

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}


class ExpertWeights(NamedTuple):
    """Experts of one layer, in order: gate_up [2F, D] each (gate rows first), down [D, F] each.

    Where all are plain tensors they may come stacked, [E, 2F, D] and [E, D, F].
    """

    gate_up: Tensor | Sequence[Weight]
    down: Tensor | Sequence[Weight]


def read_tensor(tensor: TensorInfo, *, start_row: int = 0, rows: int | None = None) -> Tensor:
    """A tensor, or `rows` of its first axis from `start_row`, in the dtype of the file.

    Raises:
        ValueError: rows that it does not have, or a dtype that no parameter may have.
        CheckpointError: the file cannot be read.
    """
    if tensor.dtype not in TORCH_DTYPES:
        raise ValueError(f"{tensor.name} is {tensor.dtype}, read are {', '.join(TORCH_DTYPES)}")
    start, nbytes, shape = tensor.start, tensor.nbytes, tensor.shape
    if start_row or rows is not None:
        have = shape[0] if shape else 0
        rows = have - start_row if rows is None else rows
        if not 0 <= start_row <= start_row + rows <= have:
            raise ValueError(f"rows {start_row} to {start_row + rows} of {tensor.name} with {have}")
        row_bytes = nbytes // have if have else 0
        start, nbytes, shape = start + start_row * row_bytes, rows * row_bytes, (rows, *shape[1:])
    content = torch.empty(nbytes, dtype=torch.uint8)
    read_into(content.numpy().data, tensor.shard, start)
    return content.view(TORCH_DTYPES[tensor.dtype]).view(shape)


def read_outer(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Weight]:
    """`embed_tokens.weight`, `norm.weight`, `lm_head.weight`: tied, it is the embedding itself."""
    outer = _read_where(checkpoint, lambda name: not name.startswith("layers."))
    if config.tie_word_embeddings:
        outer.setdefault(HEAD, outer[EMBEDDING])
    return outer


def read_layer(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> dict[str, Weight]:
    """All of a layer but its routed experts, by name without prefix: `layers.3.mlp.gate.weight`.

    Raises:
        ValueError: no such layer.
    """
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer {layer} of {config.num_hidden_layers}")
    return _read_where(checkpoint, lambda name: name.startswith(f"layers.{layer}."))


def read_experts(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, experts: Sequence[int]
) -> ExpertWeights:
    """The weights of some experts of a layer, one by one, however the files hold them.

    Raises:
        ValueError: no such layer or expert.
    """
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer {layer} of {config.num_hidden_layers}")
    for expert in experts:
        if not 0 <= expert < config.num_experts:
            raise ValueError(f"expert {expert} of {config.num_experts}")
    return ExpertWeights(
        [_read_expert(checkpoint, GATE_UP.format(layer=layer), expert) for expert in experts],
        [_read_expert(checkpoint, DOWN.format(layer=layer), expert) for expert in experts],
    )


def packed_weight(info: PackedInfo, read: Callable[[TensorInfo], Tensor]) -> PackedWeight:
    """A packed matrix from its tensors, which `read` gets."""
    scale = read(info.scale)
    minimum = None if info.minimum is None else read(info.minimum)
    if info.zero_point is not None:
        minimum = packed_minimum(read(info.zero_point), scale, bits=info.format.bits)
    return PackedWeight(read(info.words), scale, minimum, info.format.bits, info.format.group_size)


def joined(weights: Sequence[Weight]) -> Weight:
    """Rows of one matrix, plain or packed all alike, one below the other."""
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if packed:
        return stack(packed)
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def read_weight(placement: Placement, *, expert: int | None = None) -> Weight:
    """What one placement holds; of the experts that a plain tensor fuses, all or one."""
    tensor = placement.tensor
    if isinstance(tensor, PackedInfo):
        return packed_weight(tensor, read_tensor)
    if not isinstance(tensor, TensorInfo):
        content = torch.empty(tensor.nbytes, dtype=torch.uint8)
        read_into(content.numpy().data, tensor.shard, tensor.start)
        return tensor.decode(content)
    if expert is not None:
        return read_tensor(tensor, start_row=expert, rows=1)[0]
    return read_tensor(tensor).view(placement.target.shape)


def _read_where(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> dict[str, Weight]:
    return {
        name: read_weight(part)
        for (name, expert), (part, *_) in checkpoint.parts.items()
        if expert is None and not part.target.kind.fused and wanted(name)
    }


def _read_expert(checkpoint: Checkpoint, name: str, expert: int) -> Weight:
    fused = checkpoint.parts.get((name, None))
    if fused is not None:
        return read_weight(fused[0], expert=expert)
    return joined([read_weight(part) for part in checkpoint.parts[name, expert]])


def read_into(memory: memoryview, path: Path, start: int) -> None:
    """Fills `memory` with the bytes of a file from `start`.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while memory:
                got = file.readinto(memory)
                if not got:
                    raise CheckpointError(f"{path} ends too early: download it again")
                memory = memory[got:]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None
