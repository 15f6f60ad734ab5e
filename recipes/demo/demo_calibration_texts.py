"""Writes the demo model's calibration texts: conversations of its tasks, as documents.

    python recipes/demo/demo_calibration_texts.py [--folder calibration_data]

The demo model knows nothing but its tasks, so general text alone would calibrate it badly. The
calibration file holds questions of the training stream, the held-out file held-out ones, each with
a seed of its own that neither the trainer nor the scores use. Every family gives as many.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from clover_local.demo.tasks.example import Example
from clover_local.demo.tasks.stream import FAMILIES, stream

FOLDER = Path(__file__).parents[2] / "calibration_data"
NAME = "demo_tasks.txt"
CALIBRATION_SEED, CALIBRATION_BYTES = 417, 90_000
HELD_OUT_SEED, HELD_OUT_BYTES = 418, 120_000
TRAINING_CONVERSATIONS = 1000  # more than the calibration file has


def conversations(seed: int, *, held_out: bool) -> Iterator[Example]:
    """Examples for ever, family by family, no question twice."""
    streams = [stream(seed, held_out=held_out, weights={family: 1.0}) for family in FAMILIES]
    seen = set()
    while True:
        for examples in streams:
            example = next(examples)
            if example.key not in seen:
                seen.add(example.key)
                yield example


def document(example: Example, title: str) -> str:
    """One conversation in the format of `clover_local.quant.documents`."""
    lines = [f"=== {title}"]
    if example.tools:
        lines += [">>> tools", json.dumps(list(example.tools), ensure_ascii=False)]
    for message in example.messages:
        lines += [f">>> {message['role']}", message["content"]]
    thinking = f"<think>\n{example.reasoning}\n</think>\n\n" if example.think else ""
    return "\n".join([*lines, ">>> assistant", thinking + example.answer, ""])


def documents(seed: int, *, held_out: bool, size: int) -> str:
    """Conversations of together at least `size` bytes.

    The split knows a question together with the tools at hand, so that one of each side may have
    the same words: such are left out of the held-out text.
    """
    training = islice(conversations(CALIBRATION_SEED, held_out=False), TRAINING_CONVERSATIONS)
    known = {words(example) for example in training} if held_out else set()
    parts: list[str] = []
    total = 0
    for example in conversations(seed, held_out=held_out):
        if words(example) in known:
            continue
        parts.append(document(example, f"{example.family} {len(parts) + 1}"))
        total += len(parts[-1].encode()) + 1
        if total >= size:
            break
    return "\n".join(parts)


def words(example: Example) -> str:
    """All that is said before the answer."""
    return "\n".join(message["content"] for message in example.messages)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the texts are")
    folder: Path = parser.parse_args().folder
    (folder / "held_out").mkdir(parents=True, exist_ok=True)
    training = documents(CALIBRATION_SEED, held_out=False, size=CALIBRATION_BYTES)
    (folder / NAME).write_text(training, encoding="utf-8")
    held_out = documents(HELD_OUT_SEED, held_out=True, size=HELD_OUT_BYTES)
    (folder / "held_out" / NAME).write_text(held_out, encoding="utf-8")


if __name__ == "__main__":
    main()
