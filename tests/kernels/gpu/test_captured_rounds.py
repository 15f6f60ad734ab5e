"""Rounds of verify and accept whose forwards are captured, and replayed by a tape on the CPU.

The doubles of torch's graphs write down operators and kernels and run them again on the tensors of
then, so what a forward takes from Python is what it was when it was captured. A wait for the device
while that is written down is an error, as on a card; what a card may find besides is not seen.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from clover_local.cache import SequenceState
from clover_local.decoding.settings import resolve
from clover_local.kernels.choice import VARIABLE
from clover_local.kernels.gpu.replay import Replay
from clover_local.model import graphs
from clover_local.model.clover import Clover
from clover_local.model.graphs import GraphedClover
from clover_local.placement import MemoryOptions
from clover_local.session import load, open_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")

Step = Callable[[], None]
WAITS = ("aten::_local_scalar_dense", "aten::nonzero")


class Tape:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


class Recording(TorchDispatchMode):
    """Stands for `torch.cuda.graph`: operators run, kernels do not."""

    def __init__(self, tape: Tape, **_: object) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func.name() in WAITS:
            raise RuntimeError(f"{func.name()} waits for the device")
        result = func(*args, **given)

        def again() -> None:
            fresh = tree_leaves(func(*args, **given))
            for old, new in zip(tree_leaves(result), fresh, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._tape.steps.append(again)
        return result

    def __enter__(self) -> Any:
        launch, steps = InterpretedFunction.run, self._tape.steps
        self._launch = launch

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            steps.append(lambda: launch(kernel, *args, **kwargs))

        InterpretedFunction.run = run
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        InterpretedFunction.run = self._launch
        super().__exit__(*error)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay[Any]]:
    """All that are made."""
    made: list[Replay[Any]] = []

    def replay(function: Callable[[], Any], **_: object) -> Replay[Any]:
        made.append(Replay(function, device=torch.device("cuda")))
        return made[-1]

    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(graphs, "Replay", replay)
    return made


@pytest.fixture
def offloaded(quantized_folder: Path, replays: list[Replay[Any]]) -> Clover:
    """So few slots that every forward is cut at the experts of each layer."""
    opened = open_model(str(quantized_folder))
    settings = resolve(opened.config, opened.generation, {}).settings
    memory = MemoryOptions(expert_slots=9)
    return load(opened, settings, context=300, device="cpu", dtype="float32", memory=memory).model


def assert_same(ours: SequenceState, theirs: SequenceState) -> None:
    assert list(ours.committed.tokens) == list(theirs.committed.tokens)
    for a, b in zip(ours.committed.recurrent, theirs.committed.recurrent, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours.committed.conv, theirs.committed.conv, strict=True):
        assert torch.equal(a, b)
    for layer in ours.attention_layers:
        assert all(map(torch.equal, ours.keys_values(layer), theirs.keys_values(layer)))


@pytest.mark.slow
def test_replayed_verifies_are_those_of_the_model(
    offloaded: Clover, replays: list[Replay[Any]]
) -> None:
    """Other tokens behind other lengths; the third of a set of states is the second replay."""
    graphed = GraphedClover(offloaded, on_fallback=lambda line: pytest.fail(line))
    ours, theirs = (
        SequenceState(offloaded.config, context=300, device="cpu", dtype=torch.float32)
        for _ in range(2)
    )
    for tokens, accepted in (
        ([5, 6], 0),  # as it is
        ([8, 9], 2),  # captured, in pieces
        ([1, 2], 1),  # of the other set of states, as it is
        ([11, 12], 2),  # replayed
    ):
        got = graphed.verify(tokens, ours)
        if accepted:
            expected = offloaded.verify(tokens, theirs)
            assert torch.equal(got.logits, expected.logits)
            graphed.accept(got.record, accepted, ours)
            offloaded.accept(expected.record, accepted, theirs)
            assert_same(ours, theirs)
    assert [replay.is_captured for replay in replays] == [True, False]
