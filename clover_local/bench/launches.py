"""What a pass, a commit, an AR token and a draft launch on a GPU, counted without one.

    python -m clover_local.bench.launches [--json]

The decoding loop runs a model of the real shapes whose tensors have no memory (torch's `meta`
device). A launch of a Triton kernel is written down and not made; of torch's operators those count
that give more than another view of a tensor. Nothing on the way depends on a value, so the launches
are those of a card.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from clover_local.bench.models import random_model, real_layers
from clover_local.cache import SequenceState, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.device_pick import DevicePicker
from clover_local.decoding.run import Run
from clover_local.decoding.settings import Settings
from clover_local.kernels.choice import VARIABLE
from clover_local.model.graphs import GraphedClover

LIMIT = 500
"""Launches of a pass, the pick included."""
COMMIT_ROWS, DRAFT_ROWS = 32, 16
META = torch.device("meta")


@dataclass
class Launches:
    """What one forward and the pick behind it start on the device, by name."""

    kernels: Counter[str] = field(default_factory=Counter)  # Triton's
    operators: Counter[str] = field(default_factory=Counter)  # torch's, copies to the host included
    uploads: Counter[str] = field(default_factory=Counter)  # copies from the host

    @property
    def total(self) -> int:
        """All but uploads: within a block the device keeps itself up to date."""
        return self.kernels.total() + self.operators.total()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down torch's operators that a device has to do something for."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {x.device.type for x in given}
        name = str(func.name()).removeprefix("aten::")
        if name == "copy_" and places == {"meta", "cpu"}:
            target, source = args[:2]
            known = self._launches.operators if source.is_meta else self._launches.uploads
            known["copy to the host" if source.is_meta else "copy from the host"] += 1
            return target
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_meta]
        changes = func._schema.is_mutable and any(x.is_meta for x in given)
        if changes or (_fresh(made, given) and not name.split(".")[0].startswith(_NOTHING_TO_DO)):
            upload = places == {"cpu"}
            (self._launches.uploads if upload else self._launches.operators)[name] += 1
        return result


_NOTHING_TO_DO = ("empty", "new_empty")


def _fresh(made: list[Tensor], given: list[Tensor]) -> bool:
    """Whether a tensor was made that is no view of a given one."""
    known = {x.untyped_storage()._cdata for x in given}
    return any(x.untyped_storage()._cdata not in known for x in made)


@contextmanager
def recorded(launches: Launches) -> Iterator[None]:
    """Within it launches are written down; kernels of Triton are not run.

    Triton has a hook before a launch but none in place of it, so the two classes that launch get
    another method for so long.
    """

    def run(kernel: Any, *_: object, **__: object) -> None:
        launches.kernels[kernel.fn.__name__] += 1

    kept = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    try:
        for kind in kept:
            kind.run = run
        with _Operators(launches):
            yield
    finally:
        for kind, method in kept.items():
            kind.run = method


def count(config: ModelConfig) -> dict[str, Launches]:
    """Counts for a model of this shape with INT4 experts and INT8 elsewhere, on Triton's kernels.

    Raises:
        ValueError: `CLOVER_KERNELS` is not `triton`, so others would be counted.
    """
    if os.environ.get(VARIABLE) != "triton":
        raise ValueError(f"{VARIABLE} is {os.environ.get(VARIABLE)}, not triton")
    with recorded(Launches()):
        model = random_model(config, weights="int4", device=META, dtype=torch.bfloat16)
        state = SequenceState(config, context=512, device=META, dtype=torch.bfloat16)
        settings = Settings(config.mask_token_id, config.vocab_size)
        run = Run(
            GraphedClover(model, on_fallback=_refuse),
            state,
            settings,
            prompt_tokens=0,
            picker=DevicePicker(META),
        )
    block = [config.mask_token_id] * config.block_size

    def one_pass() -> None:
        run.pick_next(run.preview(block).logits)

    def ar_token() -> None:
        run.commit([1], logits=True)
        assert run.next_logits is not None
        run.pick_next(run.next_logits)

    drafted = [1, *[config.mask_token_id] * (DRAFT_ROWS - 1)]

    def proposal() -> None:
        run.propose(run.preview(drafted), block=drafted)

    def verify() -> None:
        run.judge(run.verify([1] * DRAFT_ROWS), drafts=[1] * (DRAFT_ROWS - 1))

    records: list[VerifyRecord] = []

    def accept() -> None:
        run.accept(records.pop(), DRAFT_ROWS // 2)

    forwards: dict[str, Callable[[], None]] = {
        f"pass of {config.block_size} rows": one_pass,
        f"commit of {COMMIT_ROWS} rows": lambda: run.commit([1] * COMMIT_ROWS, logits=False),
        "AR token": ar_token,
        f"draft of {DRAFT_ROWS} rows": proposal,
        f"verify of {DRAFT_ROWS} rows": verify,
        "accept": accept,
    }
    counted = {}
    for name, forward in forwards.items():
        for _ in range(3):  # the first ones make buffers
            launches = Launches()
            if forward is accept:
                with recorded(Launches()):
                    records.append(run.verify([1] * DRAFT_ROWS).record)
            with recorded(launches):
                forward()
        counted[name] = launches
    return counted


def _refuse(reason: str) -> None:
    raise RuntimeError(f"passes would not be graphs: {reason}")


def _show(counted: dict[str, Launches]) -> None:
    names = sorted({name for x in counted.values() for name in (*x.kernels, *x.operators)})
    most = max(counted.values(), key=lambda launches: launches.total)
    names.sort(key=lambda name: -(most.kernels + most.operators)[name])
    heads = "".join(f"{name:>20}" for name in counted)
    print(f"{'launches':<28}{heads}")
    for name in names:
        cells = "".join(f"{(x.kernels + x.operators)[name] or '':>20}" for x in counted.values())
        print(f"{name:<28}{cells}")
    print(f"{'all':<28}" + "".join(f"{x.total:>20}" for x in counted.values()))
    uploads = "".join(f"{x.uploads.total() or '':>20}" for x in counted.values())
    print(f"{'copies from the host':<28}{uploads}")


def main(arguments: Sequence[str]) -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(prog="clover_local.bench.launches", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    os.environ[VARIABLE] = "triton"
    counted = count(real_layers(layers=40, experts=256, vocabulary=248320))
    if options.json:
        print(json.dumps({name: asdict(launches) for name, launches in counted.items()}, indent=2))
    else:
        _show(counted)


if __name__ == "__main__":
    main(sys.argv[1:])
