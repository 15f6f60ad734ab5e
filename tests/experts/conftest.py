"""Checkpoints of many formats, models over offloaded experts, and a run that both kinds make."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import Checkpoint, open_checkpoint
from clover_local.checkpoint.read import read_experts, read_layer, read_outer
from clover_local.checkpoint.write import NamedTensor, expert_tensors, write_shard
from clover_local.config import ModelConfig
from clover_local.experts.files import Files, Reader
from clover_local.experts.offloaded import OffloadedExperts
from clover_local.experts.resident import ResidentExperts
from clover_local.experts.store import ExpertStore
from clover_local.kernels.packed import Weight
from clover_local.model.clover import Clover
from clover_local.residency.pools import SlotPools, pools_of
from clover_local.residency.profile import Profile

MakeMatrix = Callable[[int, int, str, Tensor], Weight]
"""Layer, expert, gate, up or down, and the float matrix: how it is stored."""


@dataclass(frozen=True, eq=False)
class OnDisk:
    """A checkpoint and its config."""

    checkpoint: Checkpoint
    config: ModelConfig


class Disk:
    """A reader that can do what a disk does: writes down its reads, and fails at the n-th."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = Files(shard.path for shard in checkpoint.shards)
        self.reads: list[tuple[Path, int, int]] = []
        self.fails_at: int | None = None
        self.error: BaseException = KeyboardInterrupt()

    def read(self, path: Path, start: int, *, into: memoryview) -> None:
        if self.fails_at == len(self.reads):
            self.fails_at = None
            half = len(into) // 2
            self._files.read(path, start, into=into[:half])
            raise self.error
        self.reads.append((path, start, len(into)))
        self._files.read(path, start, into=into)


@pytest.fixture(scope="session")
def golden(golden_folder: Path, golden_config: ModelConfig) -> OnDisk:
    """BF16 experts, all of a layer in one tensor."""
    return OnDisk(open_checkpoint(golden_folder, golden_config), golden_config)


@pytest.fixture(scope="session")
def quantized(quantized_folder: Path, golden_config: ModelConfig) -> OnDisk:
    """INT4 experts."""
    return OnDisk(open_checkpoint(quantized_folder, golden_config), golden_config)


class WriteExperts(Protocol):
    """Writes the golden checkpoint with experts stored in another way, one by one."""

    def __call__(self, folder: Path, make: MakeMatrix) -> OnDisk: ...


@pytest.fixture(scope="session")
def write_experts(golden: OnDisk) -> WriteExperts:
    """See `WriteExperts`."""

    def write(folder: Path, make: MakeMatrix) -> OnDisk:
        config = golden.config
        experts: list[NamedTensor] = []
        last: list[NamedTensor] = []
        rest: list[NamedTensor] = []
        for layer in range(config.num_hidden_layers):
            weights = read_experts(golden.checkpoint, config, layer, range(config.num_experts))
            for expert, (gate_up, down) in enumerate(zip(*weights, strict=True)):
                gate, up = gate_up.chunk(2)
                matrices = {"gate": gate, "up": up, "down": down}
                made = {n: make(layer, expert, n, w) for n, w in matrices.items()}
                name = f"model.layers.{layer}.mlp.experts.{expert}."
                tensors = expert_tensors(name, made["gate"], up=made["up"], down=made["down"])
                experts += tensors.main
                last += tensors.last
            layer_rest = read_layer(golden.checkpoint, config, layer)
            rest += [NamedTensor(f"model.{name}", plain(w)) for name, w in layer_rest.items()]
        for name, weight in read_outer(golden.checkpoint, config).items():
            prefix = "" if name == "lm_head.weight" else "model."
            rest.append(NamedTensor(prefix + name, plain(weight)))
        folder.mkdir(exist_ok=True)
        write_shard(folder / "model.safetensors", [*experts, *rest, *last])
        return OnDisk(open_checkpoint(folder, config), config)

    return write


def plain(weight: Weight) -> Tensor:
    """A weight that is not packed."""
    assert isinstance(weight, Tensor)
    return weight


class WriteRandom(Protocol):
    """Writes a model of any shape in float32."""

    def __call__(self, folder: Path, config: ModelConfig) -> OnDisk: ...


@pytest.fixture(scope="session")
def write_random(
    random_parameters: Callable[[ModelConfig], dict[str, Tensor]],
) -> WriteRandom:
    """See `WriteRandom`."""

    def write(folder: Path, config: ModelConfig) -> OnDisk:
        parameters = random_parameters(config)
        head = {"lm_head.weight": parameters.pop("lm_head.weight")}
        folder.mkdir(exist_ok=True)
        save_file(
            {**head, **{f"model.{name}": x.contiguous() for name, x in parameters.items()}},
            folder / "model.safetensors",
        )
        return OnDisk(open_checkpoint(folder, config), config)

    return write


def profile_for(config: ModelConfig) -> Profile:
    """Some profile."""
    shape = (config.num_hidden_layers, config.num_experts)
    return Profile(9, np.random.default_rng(1).integers(0, 9, shape))


def offload(
    on_disk: OnDisk,
    slots: int,
    *,
    policy: str = "lfru",
    reader: Reader | None = None,
    passing: int | None = None,
) -> OffloadedExperts:
    """Empty slots: so many in all, spread over the sizes of records."""
    store = ExpertStore(
        on_disk.checkpoint, on_disk.config, device="cpu", dtype=torch.float32, reader=reader
    )
    pools = pools_of(store.record_bytes)
    layers = store.num_layers
    counts = [max(1, slots * len(pool.layers) // layers) for pool in pools]
    tables = SlotPools(
        pools,
        store.num_experts,
        slots=counts,
        policy=policy,
        profile=profile_for(on_disk.config),
        passing=passing,
    )
    return OffloadedExperts(store, tables, device="cpu")


def model_over(on_disk: OnDisk, experts: OffloadedExperts | None) -> Clover:
    """A model with these experts, or with resident ones."""
    loaded = load_parameters(on_disk.checkpoint, on_disk.config)
    return Clover(
        on_disk.config,
        loaded.parameters,
        experts=experts or ResidentExperts(loaded.experts),
        device="cpu",
        dtype=torch.float32,
    )


def steps(model: Clover, state: SequenceState, *, chunk: int = 9) -> Iterator[Tensor]:
    """A prompt in chunks, then two blocks of previews and a commit; after each its logits."""
    config = model.config
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        high = min(config.mask_token_id, config.vocab_size)
        return torch.randint(0, high, (count,), generator=generator).tolist()

    prompt = ids(20)
    while state.length < len(prompt):
        rows = prompt[state.length : state.length + chunk]
        yield model.commit(rows, state, kind="prompt").logits
    for _ in range(2):
        block = [config.mask_token_id] * 12
        for row, token in enumerate(ids(3)):
            yield model.preview(block, state).logits
            block[row] = token
        yield model.commit(block, state).logits


def run(model: Clover, *, count: int | None = None) -> list[Tensor]:
    """The logits of `steps` from an empty state."""
    state = SequenceState(model.config, context=100, device="cpu", dtype=torch.float32)
    return [logits.clone() for logits in islice(steps(model, state), count)]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether all bits are equal, and there are some."""
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))
