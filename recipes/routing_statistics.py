"""Routing of the demo model on held-out questions, or of a synthetic trace, as statistics.

    python recipes/routing_statistics.py [--model FOLDER] [--questions 400] [--seed 7] [--save FILE]
    python recipes/routing_statistics.py --synthetic [--layers 40] [--blocks 40] [--seed 7]

Prints the statistics as Markdown; `--save` keeps the routing for `clover-local simulate`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from clover_local.cache import SequenceState, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.forwards import ForwardOutput, Model, VerifiedOutput
from clover_local.decoding.settings import resolve
from clover_local.demo.tasks.stream import FAMILIES, stream
from clover_local.residency.demand import CommitKind, Kind
from clover_local.residency.statistics import RoutingStatistics, alike, statistics
from clover_local.residency.synthetic import Synthetic, synthetic_trace
from clover_local.residency.trace import Forward, RoutingTrace, forward_of, routing_record
from clover_local.session import load, open_model


class Recorder:
    """A model that notes the routing of each of its forwards."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.forwards: list[Forward] = []
        self.block = self.number = 0
        self.in_prompt = True

    @property
    def config(self) -> ModelConfig:
        """See `Model`."""
        return self.model.config

    @property
    def can_preview(self) -> bool:
        """See `Model`."""
        return self.model.can_preview

    @property
    def device(self) -> torch.device:
        """See `Model`."""
        return self.model.device

    def start(self) -> None:
        """The next forwards belong to a prompt, and begin another block."""
        self.block, self.number, self.in_prompt = self.block + 1, 0, True

    def commit(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last", "none"] = "last",
        kind: CommitKind = "commit",
    ) -> ForwardOutput:
        """See `Model`. Commits before the first preview are those of the prompt."""
        output = self.model.commit(tokens, state, logits=logits)
        self._note("prompt" if self.in_prompt else "commit", output)
        if not self.in_prompt:
            self.block, self.number = self.block + 1, 0
        return output

    def verify(self, tokens: Sequence[int], state: SequenceState) -> VerifiedOutput:
        """See `Model`; answers here draft nothing."""
        return self.model.verify(tokens, state)

    def accept(self, record: VerifyRecord, rows: int, state: SequenceState) -> None:
        """See `Model`."""
        self.model.accept(record, rows, state)

    def offload_stats(self) -> None:
        """See `Model`; every expert is resident."""

    def give_up_memory(self) -> None:
        """See `Model`."""

    def preview(self, block: Sequence[int], state: SequenceState) -> ForwardOutput:
        """See `Model`."""
        output = self.model.preview(block, state)
        self.in_prompt = False
        masked = [token == self.config.mask_token_id for token in block]
        self._note("preview", output, masked=masked)
        self.number += 1
        return output

    def _note(self, kind: Kind, output: ForwardOutput, *, masked: list[bool] | None = None) -> None:
        self.forwards.append(
            forward_of(
                [ids.cpu().numpy() for ids in output.expert_ids],
                num_experts=self.config.num_experts,
                kind=kind,
                block=self.block,
                number=self.number,
                masked=masked,
            )
        )


@dataclass(frozen=True)
class Recorded:
    """The routing of all answers, and which forwards belong to which family of questions."""

    trace: RoutingTrace
    families: tuple[str, ...]  # by forward

    def of_family(self, family: str) -> RoutingTrace:
        """The forwards of one family."""
        pairs = zip(self.trace.forwards, self.families, strict=True)
        chosen = tuple(forward for forward, own in pairs if own == family)
        return replace(self.trace, forwards=chosen)


def record(model: str, *, questions: int, seed: int) -> Recorded:
    """Answers held-out questions in the order of the stream, each from an empty state."""
    opened = open_model(model)
    settings = replace(resolve(opened.config, opened.generation, {}).settings, max_new_tokens=256)
    session = load(opened, settings, device="cpu")
    recorder = Recorder(session.generator.model)
    session.generator.model = recorder
    families: list[str] = []
    for number, example in enumerate(islice(stream(seed, held_out=True), questions), start=1):
        prompt = opened.tokenizer.render(
            example.messages, enable_thinking=example.think, tools=example.tools or None
        )
        session.generator.state.reset()
        recorder.start()
        for _ in session.generator.run(opened.tokenizer.encode(prompt)):
            pass
        families += [example.family] * (len(recorder.forwards) - len(families))
        if number % 50 == 0:
            print(f"{number} of {questions} questions", file=sys.stderr)
    config = opened.config
    trace = RoutingTrace(config.num_hidden_layers, config.num_experts, tuple(recorder.forwards))
    return Recorded(trace, tuple(families))


def save(trace: RoutingTrace, path: Path) -> None:
    """Writes the records that `clover-local simulate` reads."""
    with path.open("w", encoding="utf-8") as file:
        for forward in trace.forwards:
            name = "pass" if forward.kind == "preview" else "commit"
            of = {"prompt": "prompt", "commit": "answer"}.get(forward.kind)
            found = {"record": name, "of": of, "routing": routing_record(forward)}
            file.write(json.dumps(found) + "\n")


def table(found: RoutingStatistics) -> list[str]:
    """The statistics in words, as a Markdown table."""
    rows = [
        ("blocks; previews a block", f"{found.blocks}; {found.previews_per_block:.2f}"),
        ("experts of a block's first preview", _plain(found.experts_first)),
        ("experts of later previews", _plain(found.experts_later)),
        ("experts of a commit", _plain(found.experts_commit)),
        ("experts of a whole block", _plain(found.experts_block)),
        ("experts of a prompt", _plain(found.experts_prompt)),
        ("adjacent previews of a block, cosine", _plain(found.alike_passes, 3)),
        ("new to the block in a later preview", _plain(found.new_later)),
        ("new to the block in its commit", _plain(found.new_commit)),
        ("used by the block before, of a block's experts", _percent(found.again_block)),
        ("used by the first preview before, of a first preview's", _percent(found.again_first)),
        ("experts of masked rows, where there is text too", _plain(found.experts_masks)),
        ("experts of text rows in the same previews", _plain(found.experts_text)),
        ("masked rows and text rows, cosine", _plain(found.alike_masks_text, 3)),
        ("a prompt and its answer's commits, cosine", _plain(found.alike_prompt_answer, 3)),
        ("uses of the most used quarter of experts", _percent(found.share_top_quarter)),
        ("uses of the most used half", _percent(found.share_top_half)),
    ]
    return ["| per layer | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows)]


def family_table(recorded: Recorded) -> list[str]:
    """Skew by domain, and how alike each domain's commits are to those of all."""
    lines = [
        "| family | blocks | experts of a commit | most used quarter | alike to all |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    every = _commit_rows(recorded.trace)
    for family in FAMILIES:
        own = recorded.of_family(family)
        if any(forward.kind == "commit" for forward in own.forwards):
            found = statistics(own)
            lines.append(
                f"| {family} | {found.blocks} | {_plain(found.experts_commit)} "
                f"| {_percent(found.share_top_quarter)} | {alike(_commit_rows(own), every):.3f} |"
            )
    return lines


def _commit_rows(trace: RoutingTrace) -> np.ndarray:
    return sum(
        (f.rows.astype(np.int64) for f in trace.forwards if f.kind == "commit"),
        start=np.zeros((trace.layers, trace.experts), np.int64),
    )


def _plain(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder of a checkpoint")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--synthetic", action="store_true", help="no model; see residency/synthetic"
    )
    parser.add_argument("--layers", type=int, default=40, help="of the synthetic trace")
    parser.add_argument("--blocks", type=int, default=40, help="of the synthetic trace")
    parser.add_argument("--save", type=Path, help="write the trace here")
    arguments = parser.parse_args()
    lines: list[str] = []
    if arguments.synthetic:
        shape = Synthetic(layers=arguments.layers, blocks=arguments.blocks, seed=arguments.seed)
        trace = synthetic_trace(shape)
    else:
        recorded = record(arguments.model, questions=arguments.questions, seed=arguments.seed)
        trace, lines = recorded.trace, ["", *family_table(recorded)]
    if arguments.save is not None:
        save(trace, arguments.save)
    print("\n".join([*table(statistics(trace)), *lines]))


if __name__ == "__main__":
    main()
