"""Which tensor of a checkpoint becomes which parameter, and whether all fit; needs no torch.

Everything is decided from the headers, before any weight is read: a wrong checkpoint of 69 GB is
refused in a second, with every complaint at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clover_local.checkpoint.parameters import EXPERT, PREFIXES, Target, targets
from clover_local.checkpoint.shards import Shard, TensorInfo, abbreviated, read_shards
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError

FOREIGN_FAMILIES = ("mtp.", "visual.", "model.visual.")
FLOAT_DTYPES = ("BF16", "F16", "F32")


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
    wanted = dict(targets(config, prefix=prefix, per_expert=per_expert))
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
