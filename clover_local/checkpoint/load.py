"""Reads the tensors of a checkpoint into memory, once, from a memory map.

On the CPU a tensor that already has the wanted dtype stays a view of the map; any other is
converted on its own, so that no second copy of the model exists at any time. Experts that are apart
on disk are stacked in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clover_local.checkpoint.parameters import DOWN, GATE_UP, PARAMETERS
from clover_local.checkpoint.placements import Checkpoint, Placement
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError


class ExpertWeights(NamedTuple):
    """The experts of one layer: gate_up [E, 2F, D] (gate rows first), down [E, D, F]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class LoadedParameters:
    """A model's weights: `parameters` by name without prefix, the experts of each layer apart.

    Linear weights are [out, in]; `conv1d.weight` is [C, 4] and `conv_right_weight` [C, 3].
    `lm_head.weight` is always there: with tied embeddings it is the embedding itself.
    """

    parameters: dict[str, Tensor]
    experts: tuple[ExpertWeights, ...]


def load_parameters(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedParameters:
    """Loads every parameter to `device`: float32 where `PARAMETERS` says so, `dtype` elsewhere.

    Args:
        on_progress: called after each tensor with bytes read so far and bytes in all.

    Raises:
        CheckpointError: the tensors do not fit `config` (raised before anything is read), or a file
            cannot be read.
    """
    checkpoint.require_fit()
    parameters: dict[str, Tensor] = {}
    total = sum(placement.tensor.nbytes for placement in checkpoint.placements)
    done = 0
    for shard, placements in groupby(
        checkpoint.placements, lambda placement: placement.tensor.shard
    ):
        try:
            with safe_open(shard, framework="pt") as file:
                for placement in placements:
                    source = file.get_tensor(placement.tensor.name)
                    _place(parameters, placement, source, config, device=device, dtype=dtype)
                    done += placement.tensor.nbytes
                    on_progress(done, total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} cannot be read ({error}): download it again") from None
    experts = tuple(
        ExpertWeights(
            parameters.pop(GATE_UP.format(layer=layer)), parameters.pop(DOWN.format(layer=layer))
        )
        for layer in range(config.num_hidden_layers)
    )
    parameters.setdefault("lm_head.weight", parameters["embed_tokens.weight"])
    return LoadedParameters(parameters, experts)


def _place(
    parameters: dict[str, Tensor],
    placement: Placement,
    source: Tensor,
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    target = placement.target
    if target.expert is None:
        wanted = torch.float32 if target.kind.float32 else dtype
        parameters[target.name] = source.reshape(target.shape).to(device=device, dtype=wanted)
        return
    if target.name not in parameters:
        stacked = PARAMETERS[target.kind.rows_of].shape(config)
        parameters[target.name] = torch.empty(stacked, device=device, dtype=dtype)
    end = target.first_row + target.shape[0]
    parameters[target.name][target.expert, target.first_row : end].copy_(source)
