"""The export itself: a plan of every byte, then tensor by tensor, a few pieces in memory.

Pieces (an expert, or some rows) are encoded by several threads and written in order, so the bytes
do not depend on how many there are.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clover_local.checkpoint.write import write_file
from clover_local.errors import CheckpointError
from clover_local.gguf.container import TYPE_KEY, MetaValue, require_target
from clover_local.gguf.diffusion import (
    SIDECAR_TYPE,
    array_metadata,
    control_metadata,
    fingerprint_metadata,
    sidecar_path,
)
from clover_local.gguf.export.encode import Encode, find_encoder
from clover_local.gguf.export.metadata import model_metadata, special_metadata
from clover_local.gguf.export.mixtures import Mixture, tensor_type
from clover_local.gguf.export.partial import PartialFile, is_finished, open_partial
from clover_local.gguf.export.source import Source
from clover_local.gguf.imatrix import Sums
from clover_local.gguf.tensors import NamedEntry, named_entries
from clover_local.gguf.types import PLAIN_TYPES
from clover_local.gguf.vocabulary import vocabulary_metadata
from clover_local.gguf.write import Layout, PlannedTensor, lay_out

DIFFUSION = ("embed", "sidecar", "none")
SOURCE_KEY = "clover.source_sha256"
_SAMPLE_BYTES = 4096  # of each tensor of the source

Floats = NDArray[np.float32]
OnProgress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What will be written: every tensor with its type, and where it lies."""

    named: tuple[NamedEntry, ...]
    tensors: tuple[PlannedTensor, ...]
    layout: Layout
    importance: dict[str, Floats]  # by tensor name, [matrices, columns]


@dataclass(frozen=True)
class Exported:
    """What has been written. `was_finished`: before this call."""

    path: Path
    nbytes: int
    sidecar: Path | None
    was_finished: bool


def make_plan(
    source: Source,
    mix: Mixture,
    *,
    architecture: str,
    diffusion: str,
    imatrix: dict[str, Sums] | None = None,
) -> Plan:
    """Metadata, types and places; reads only small parameters.

    Raises:
        CheckpointError: an imatrix of another model.
        TokenizerError: a tokenizer that the format cannot hold.
    """
    config = source.config
    named = tuple(named_entries(config))
    tensors = tuple(
        PlannedTensor(each.name, tensor_type(each, mix, config), each.shape) for each in named
    )
    importance = _importance(named, imatrix or {})
    metadata = {
        **model_metadata(config, architecture=architecture, name=source.name, file_type=mix.number),
        **vocabulary_metadata(
            source.tokenizer.to_json(), vocab_size=config.vocab_size, source=source.name
        ),
        **special_metadata(
            config, source.generation, template=source.tokenizer.templates.get("default")
        ),
    }
    if importance:
        metadata["quantize.imatrix.entries_count"] = len(importance)
    if diffusion == "embed" and source.checkpoint.has_diffusion:
        metadata |= _diffusion_metadata(source)
    metadata[SOURCE_KEY] = _source_hash(source, importance)
    return Plan(named, tensors, lay_out(metadata, tensors), importance)


def export_gguf(
    source: Source,
    path: Path,
    plan: Plan,
    *,
    diffusion: str,
    jobs: int,
    on_progress: OnProgress = lambda done, total: None,
) -> Exported:
    """Writes the file, or what an interrupted call has left of it; and the sidecar.

    Args:
        jobs: threads that encode.
        on_progress: called with bytes written by this call and bytes that it has to write.

    Raises:
        SettingsError: a type needs ggml's library.
        CheckpointError: the source cannot be read, or the file cannot be written.
    """
    kinds = {tensor.type for tensor in plan.tensors}
    encode = find_encoder(kinds, has_imatrix=bool(plan.importance))
    finished, sidecar = is_finished(path, plan.layout), None
    if diffusion == "sidecar" and source.checkpoint.has_diffusion:
        sidecar = export_diffusion(source, sidecar_path(path))
    if finished:
        return Exported(path, plan.layout.nbytes, sidecar, was_finished=True)
    with open_partial(path, plan.layout) as file, ThreadPoolExecutor(jobs) as pool:
        begin = plan.layout.starts[file.finished] if file.finished < len(plan.tensors) else 0
        for number in range(file.finished, len(plan.tensors)):
            on_progress(plan.layout.starts[number] - begin, plan.layout.nbytes - begin)
            _write_tensor(number, source, plan, file, pool=pool, encode=encode, window=2 * jobs)
        file.finish()
    return Exported(path, plan.layout.nbytes, sidecar, was_finished=False)


def export_diffusion(source: Source, path: Path) -> Path:
    """Writes the sidecar: the diffusion parameters and what tells their model.

    Raises:
        CheckpointError: the model has none, or the file cannot be written or is another one.
    """
    require_target(path, SIDECAR_TYPE)
    if not source.checkpoint.has_diffusion:
        raise CheckpointError(
            f"{source.name} has no diffusion parameters: pass the complete checkpoint"
        )
    metadata: dict[str, MetaValue] = {
        "general.architecture": SIDECAR_TYPE,
        TYPE_KEY: SIDECAR_TYPE,
        "general.name": source.name,
        **_diffusion_metadata(source),
        **fingerprint_metadata(source.config, source.parameter),
    }
    write_file(path, lay_out(metadata, ()).header)
    return path


def _diffusion_metadata(source: Source) -> dict[str, MetaValue]:
    return {
        **control_metadata(source.config, source.generation),
        **array_metadata(source.config, source.parameter),
    }


def _write_tensor(
    number: int,
    source: Source,
    plan: Plan,
    file: PartialFile,
    *,
    pool: ThreadPoolExecutor,
    encode: Encode,
    window: int,
) -> None:
    named, tensor = plan.named[number], plan.tensors[number]
    weighed = tensor.type.name not in PLAIN_TYPES
    importance = plan.importance.get(named.name) if weighed else None
    file.start_tensor(number)

    def jobs() -> Iterator[Future[NDArray[np.uint8]]]:
        for index, piece in enumerate(source.pieces(named)):
            matrix = index if named.entry.of_experts else 0
            weights = None if importance is None else importance[matrix]
            yield pool.submit(encode, piece, tensor.type, weights)

    for encoded in _in_order(jobs(), window):
        file.write(np.ascontiguousarray(encoded).data.cast("B"))
    file.end_tensor(number)


def _in_order(futures: Iterator[Future[T]], window: int) -> Iterator[T]:
    """Results in the order of submission, with at most `window` pieces under way."""
    waiting: deque[Future[T]] = deque()
    for future in futures:
        waiting.append(future)
        if len(waiting) >= window:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _importance(named: tuple[NamedEntry, ...], sums: dict[str, Sums]) -> dict[str, Floats]:
    found = {}
    for each in named:
        if each.name not in sums or each.entry.float32:
            continue
        importance = sums[each.name].importance
        matrices = each.shape[0] if each.entry.of_experts else 1
        if importance.shape != (matrices, each.shape[-1]):
            raise CheckpointError(
                f"the imatrix has {list(importance.shape)} for {each.name} of "
                f"{list(each.shape)}: use that of this model"
            )
        found[each.name] = importance
    if sums and not found:
        raise CheckpointError("the imatrix names no tensor of this model: use that of this model")
    return found


def _source_hash(source: Source, importance: dict[str, Floats]) -> str:
    """Of names and the start of every tensor: the same wherever the files lie."""
    digest = hashlib.sha256()
    for shard in source.checkpoint.shards:
        with shard.path.open("rb") as file:
            for tensor in shard.tensors:
                file.seek(tensor.start)
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                digest.update(file.read(min(tensor.nbytes, _SAMPLE_BYTES)))
    for name, array in importance.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
