"""How long it takes to load the experts of a large checkpoint, beside a plain read of its files.

    python recipes/offload_load_time.py FOLDER [--layers 8] [--rounds 3] [--share 1.0]

Writes a synthetic INT4 checkpoint with experts of the 35B model's shape into FOLDER, if there is
none (8 layers: 3.4 GB), then lets the system forget the files and does one of three things, in
turn: reads them from front to back through one buffer; reads them so into memory that it keeps;
loads the experts into slots in host memory. Prints the seconds of each round, the ratios of the
fastest ones, and what the process held in memory.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from clover_local.checkpoint.parameters import targets
from clover_local.checkpoint.placements import Checkpoint, open_checkpoint
from clover_local.checkpoint.shards import read_shard
from clover_local.checkpoint.write import (
    NamedTensor,
    expert_tensors,
    shard_name,
    write_index,
    write_shard,
)
from clover_local.config import LINEAR_ATTENTION, ModelConfig, read_model_config
from clover_local.experts.offloaded import OffloadedExperts
from clover_local.experts.store import ExpertStore
from clover_local.hub import locate
from clover_local.kernels.packed import PackedWeight
from clover_local.residency.pools import SlotPools, pools_of, split_slots

READ_BYTES = 8 << 20
GROUP_SIZE = 128


def shape(layers: int) -> ModelConfig:
    """Experts of the real model's shape in a small trunk."""
    return replace(
        read_model_config(locate("demo")),
        hidden_size=2048,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_hidden_layers=layers,
        layer_types=(LINEAR_ATTENTION,) * layers,
    )


def write(folder: Path, config: ModelConfig) -> None:
    """A shard for each layer's experts, and one for everything else."""
    folder.mkdir(parents=True, exist_ok=True)
    count = config.num_hidden_layers + 1
    paths = [folder / shard_name(number, count) for number in range(1, count + 1)]
    generator = torch.Generator().manual_seed(1)
    for layer, path in enumerate(paths[:-1]):
        write_shard(path, list(_layer(config, layer, generator)))
    wanted = targets(config, prefix="model.", per_expert=True)
    rest = [
        NamedTensor(name, torch.zeros(target.shape, dtype=torch.bfloat16))
        for name, target in wanted
        if not target.kind.rows_of
    ]
    write_shard(paths[-1], rest)
    write_index(folder, [read_shard(path) for path in paths])


def _layer(config: ModelConfig, layer: int, generator: torch.Generator) -> Iterator[NamedTensor]:
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    last: list[NamedTensor] = []
    for expert in range(config.num_experts):
        gate, up, down = (
            PackedWeight(
                _words((rows, columns // 8), generator),
                torch.rand(rows, columns // GROUP_SIZE, generator=generator).bfloat16(),
                None,
                4,
                GROUP_SIZE,
            )
            for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        name = f"model.layers.{layer}.mlp.experts.{expert}."
        tensors = expert_tensors(name, gate, up=up, down=down)
        yield from tensors.main
        last += tensors.last
    yield from last


def _words(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=generator)


def forget(checkpoint: Checkpoint) -> None:
    """Lets the system drop the files from its memory."""
    for shard in checkpoint.shards:
        with shard.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(checkpoint: Checkpoint) -> float:
    """Seconds for the files from front to back."""
    memory = memoryview(bytearray(READ_BYTES))
    began = time.perf_counter()
    for shard in checkpoint.shards:
        with shard.path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return time.perf_counter() - began


def keep_files(checkpoint: Checkpoint) -> float:
    """Seconds for the files from front to back, into new memory."""
    began = time.perf_counter()
    whole = torch.empty(sum(shard.nbytes for shard in checkpoint.shards), dtype=torch.uint8)
    left = whole.numpy().data
    for shard in checkpoint.shards:
        with shard.path.open("rb", buffering=0) as file:
            while got := file.readinto(left[:READ_BYTES]):
                left = left[got:]
    return time.perf_counter() - began


def load(checkpoint: Checkpoint, config: ModelConfig, *, share: float) -> tuple[float, int]:
    """Seconds until a share of the experts is in slots, and the bytes of these."""
    began = time.perf_counter()
    store = ExpertStore(checkpoint, config, device="cpu", dtype=torch.float32)
    pools = pools_of(store.record_bytes)
    slots = split_slots(pools, store.num_experts, memory=int(share * store.nbytes))
    tables = SlotPools(pools, store.num_experts, slots=slots, policy="lfru")
    experts = OffloadedExperts(store, tables, device="cpu")
    experts.fill()
    return time.perf_counter() - began, experts.stats().filled.bytes


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0)
    given = parser.parse_args(arguments)
    config = shape(given.layers)
    if not given.folder.is_dir():
        write(given.folder, config)
    checkpoint = open_checkpoint(given.folder, config)
    checkpoint.require_fit()
    nbytes = sum(shard.nbytes for shard in checkpoint.shards)
    print(f"{len(checkpoint.shards)} files, {nbytes / 1e9:.2f} GB")
    read, kept, loaded = [], [], []
    for _ in range(given.rounds):
        forget(checkpoint)
        read.append(read_files(checkpoint))
        forget(checkpoint)
        kept.append(keep_files(checkpoint))
        forget(checkpoint)
        seconds, placed = load(checkpoint, config, share=given.share)
        loaded.append(seconds)
        print(
            f"read {read[-1]:.2f} s, read and kept {kept[-1]:.2f} s, "
            f"loaded {placed / 1e9:.2f} GB in {seconds:.2f} s"
        )
    fastest = min(loaded)
    print(f"loaded / read: {fastest / min(read):.3f}, / kept: {fastest / min(kept):.3f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory of the process: {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main(sys.argv[1:])
