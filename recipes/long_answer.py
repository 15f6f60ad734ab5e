"""What a token costs as an answer gets long, on the demo model: time by part, and memory.

    python recipes/long_answer.py [--tokens 4000] [--every 500] [--modes denoise ar draft]
                                  [--controls off on]

Writes an answer in each mode, without and with every response control, the stop tokens suppressed.
A row of the table is of the tokens since the row before: milliseconds of this process's one thread
a token and a forward, and of a forward those in the attention layers, in the rest of the model, and
around it (controls, pick, guard, trace, text); then bytes of keys and values, and of the process.
Attention alone may grow, with the keys and values that it reads.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from clover_local.chat import AnswerReader
from clover_local.decoding.events import BlockCommitted
from clover_local.decoding.settings import resolve
from clover_local.kernels.dispatch import KeysValues
from clover_local.model.attention import Angles, Attention
from clover_local.model.clover import Clover
from clover_local.session import OpenModel, load, open_model

MODES = ("denoise", "ar", "draft", "auto")
CONTROLS: dict[str, dict[str, Any]] = {
    "off": {},
    "on": {
        "presence_penalty": 0.1,
        "frequency_penalty": 0.01,
        "repetition_penalty": 1.05,
        "dry_multiplier": 0.8,
        "no_repeat_ngram": 8,
        "in_block_repetition": True,
        "eos_order": True,
        "loop_guard": "raise",
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
    },
}
PROMPT = "Tell me a long story about a fox."

Result = TypeVar("Result")


class Clock:
    """Processor seconds of the parts of a forward, so far."""

    def __init__(self) -> None:
        self.forwards = 0
        self.model = 0.0
        self.attention = 0.0


class TimedAttention(Attention):
    """An attention layer that says how long it takes."""

    def __init__(self, layer: Attention, clock: Clock) -> None:
        self.__dict__.update(vars(layer))
        self._clock = clock

    def commit(self, x: Tensor, cache: KeysValues, *, angles: Angles) -> Tensor:
        """See `Attention.commit`."""
        began = time.process_time()
        mixed = super().commit(x, cache, angles=angles)
        self._clock.attention += time.process_time() - began
        return mixed

    def preview(self, x: Tensor, cache: KeysValues, *, angles: Angles) -> Tensor:
        """See `Attention.preview`."""
        began = time.process_time()
        mixed = super().preview(x, cache, angles=angles)
        self._clock.attention += time.process_time() - began
        return mixed


class TimedModel:
    """A model that says how long its forwards take; see `decoding.forwards.Model`."""

    def __init__(self, model: Clover, clock: Clock) -> None:
        """Puts a `TimedAttention` in the place of each attention layer."""
        self._model, self._clock = model, clock
        model.layers[:] = [
            replace(layer, mixer=TimedAttention(layer.mixer, clock))
            if isinstance(layer.mixer, Attention)
            else layer
            for layer in model.layers
        ]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name not in ("commit", "preview", "verify", "accept"):
            return found
        self._clock.forwards += name != "accept"
        return lambda *given, **options: self._timed(lambda: found(*given, **options))

    def _timed(self, forward: Callable[[], Result]) -> Result:
        began = time.process_time()
        try:
            return forward()
        finally:
            self._clock.model += time.process_time() - began


class Unwritten:
    """A trace whose records are made, and kept nowhere."""

    model = model_hash = ""

    def write(self, record: Mapping[str, object]) -> None:
        """Takes one record."""


@dataclass(frozen=True)
class Row:
    """What the tokens since the row before have cost; milliseconds."""

    tokens: int  # of the answer, so far
    per_token: float
    per_forward: float
    attention: float  # of a forward
    model: float  # of a forward, the rest of it
    host: float  # around a forward
    keys_values: int  # bytes
    process: int  # bytes


def measured(opened: OpenModel, given: Mapping[str, object], *, every: int) -> Iterator[Row]:
    """A row each time the answer has grown by `every` tokens."""
    settings = resolve(opened.config, opened.generation, given).settings
    context = opened.config.max_position_embeddings
    session = load(opened, settings, device="cpu", dtype="float32", context=context)
    generator, clock = session.generator, Clock()
    generator.model = TimedModel(session.model, clock)
    generator.trace = Unwritten()
    reader = AnswerReader(opened.tokenizer, thinking=False, stop_ids=settings.stop_ids)
    done, before = 0, (0, time.process_time(), 0.0, 0.0, 0)
    with closing(generator.run(opened.tokenizer.encode(PROMPT))) as events:
        for event in events:
            if not isinstance(event, BlockCommitted):
                continue
            reader.push(event.tokens)
            done += len(event.tokens)
            if done < before[0] + every and done < settings.max_new_tokens:
                continue
            now = (done, time.process_time(), clock.model, clock.attention, clock.forwards)
            tokens, seconds, model, attention, forwards = (
                b - a for a, b in zip(before, now, strict=True)
            )
            each = 1000 / forwards
            yield Row(
                tokens=done,
                per_token=1000 * seconds / tokens,
                per_forward=each * seconds,
                attention=each * attention,
                model=each * (model - attention),
                host=each * (seconds - model),
                keys_values=generator.state.nbytes.keys_values,
                process=process_bytes(),
            )
            before = now


def process_bytes() -> int:
    """Memory that this process has now, where Linux says so; else 0."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def table(rows: Iterator[Row]) -> Iterator[str]:
    """Markdown, a line as soon as it is known."""
    yield "| tokens | ms a token | ms a forward | attention | model | host | K/V kB | process MB |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row.tokens} | {row.per_token:.2f} | {row.per_forward:.2f} | {row.attention:.2f} "
            f"| {row.model:.2f} | {row.host:.2f} | {row.keys_values / 1e3:.0f} "
            f"| {row.process / 1e6:.1f} |"
        )


def main() -> None:
    """A table for each mode, controls off and on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:3])
    parser.add_argument("--controls", nargs="+", choices=list(CONTROLS), default=list(CONTROLS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    opened = open_model("demo")
    ends = opened.generation.stop_ids
    for mode in options.modes:
        for controls in options.controls:
            given = {"mode": mode, "max_new_tokens": options.tokens, "suppress": ends}
            print(f"\n{mode}, controls {controls}\n")
            rows = measured(opened, {**given, **CONTROLS[controls]}, every=options.every)
            for line in table(rows):
                print(line, flush=True)


if __name__ == "__main__":
    main()
