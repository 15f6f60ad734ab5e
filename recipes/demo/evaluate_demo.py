"""Accuracy of the demo model on held-out questions, by family and mode, and against the threshold.

    python recipes/demo/evaluate_demo.py [--model FOLDER] [--questions 100] [--seed 7] [--wrong]

No question of the training stream is among them. `--wrong` lists the wrong answers.
"""

import argparse
import json
import sys
from dataclasses import replace

from clover_local.decoding.settings import Settings, resolve
from clover_local.demo.score import Score, held_out, score
from clover_local.demo.tasks.example import Example
from clover_local.demo.tasks.stream import FAMILIES
from clover_local.session import Session, load, open_model

THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


def measure(session: Session, examples: list[Example], settings: Settings) -> Score:
    """The score under other settings; progress on stderr."""

    def on_answer(done: int) -> None:
        if done % 50 == 0:
            print(
                f"\r{settings.mode} {settings.threshold} {done}/{len(examples)}",
                end="",
                file=sys.stderr,
            )

    session.generator.settings = settings
    result = score(session.generator, session.opened.tokenizer, examples, on_answer=on_answer)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return result


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return (
        "| "
        + " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
        + " |"
    )


def tables(causal: Score, denoised: dict[float, Score]) -> list[str]:
    """Both tables, in percent and tokens per pass."""
    lines = [row("family", "ar", "denoise at 0.95"), row("---", "---:", "---:")]
    for family in [*FAMILIES, None]:
        lines.append(
            row(
                family or "all",
                100 * causal.accuracy(family),
                100 * denoised[0.95].accuracy(family),
            )
        )
    lines += [
        "",
        row("threshold", "right", "tokens per preview", "tokens per forward"),
        row(*["---:"] * 4),
    ]
    for threshold, result in denoised.items():
        preview = result.tokens_per_preview or 0.0
        lines.append(
            row(
                f"{threshold:.2f}",
                100 * result.accuracy(),
                f"{preview:.2f}",
                f"{result.tokens_per_forward:.2f}",
            )
        )
    return [*lines, row("ar", 100 * causal.accuracy(), "", f"{causal.tokens_per_forward:.2f}")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo", help="folder of a checkpoint (default: the bundled demo)"
    )
    parser.add_argument("--questions", type=int, default=100, help="held-out questions a family")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--thresholds", type=float, nargs="*", default=THRESHOLDS)
    parser.add_argument("--wrong", action="store_true", help="list the wrong answers")
    arguments = parser.parse_args()
    opened = open_model(arguments.model)
    settings = replace(resolve(opened.config, opened.generation, {}).settings, max_new_tokens=256)
    session = load(opened, settings, device="cpu")
    examples = held_out(arguments.seed, per_family=arguments.questions)
    causal = measure(session, examples, replace(settings, mode="ar"))
    denoised = {
        threshold: measure(
            session, examples, replace(settings, mode="denoise", threshold=threshold)
        )
        for threshold in sorted({0.95, *arguments.thresholds})
    }
    print("\n".join(tables(causal, denoised)))
    if arguments.wrong:
        for mode, result in (("ar", causal), ("denoise", denoised[0.95])):
            for answer in result.answers:
                if not answer.right:
                    asked = answer.example.messages[-1]["content"]
                    wrong = {
                        "mode": mode,
                        "asked": asked,
                        "right": answer.example.answer,
                        "given": answer.text,
                    }
                    print(json.dumps(wrong, ensure_ascii=False))


if __name__ == "__main__":
    main()
