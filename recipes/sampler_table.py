"""What each unmasking rule does on the demo model: accuracy and tokens a forward, as Markdown.

    python recipes/sampler_table.py [--model FOLDER] [--questions 5] [--seed 7]

Each rule at three settings, then the other modes, on held-out questions of every family; and how
much of long free-running texts repeats, with each control against it.
"""

import argparse
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

from clover_local.decoding.settings import Settings, resolve
from clover_local.demo.score import held_out, score
from clover_local.session import Session, load, open_model

RULES: list[tuple[str, str, list[Any]]] = [
    ("threshold", "threshold", [0.8, 0.95, 0.99]),
    ("factor", "sampler_factor", [0.3, 1.0, 2.0]),
    ("entropy_bound", "sampler_gamma", [0.01, 0.1, 0.5]),
    ("margin", "sampler_margin", [0.7, 0.9, 0.98]),
    ("fixed_steps", "sampler_steps", [4, 8, 16]),
    ("sequential", "sampler_k", [1, 2, 4]),
    ("klass", "sampler_history", [1, 2, 3]),
    ("credit", "sampler_alpha", [0.3, 0.7, 1.5]),
    ("hierarchy", "sampler_low", [0.2, 0.4, 0.7]),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("threshold, threshold_decay 0.02", {"sampler_threshold_decay": 0.02}),
    ("threshold, min_per_pass 2", {"sampler_min_per_pass": 2}),
    ("threshold, max_per_pass 4", {"sampler_max_per_pass": 4}),
    ("threshold, finish_gap", {"sampler_finish_gap": True}),
    ("threshold, eos_order", {"eos_order": True}),
    ("threshold, in_block_repetition", {"in_block_repetition": True}),
    ("mode ar", {"mode": "ar"}),
    ("mode draft, typical, width 8", {"mode": "draft", "draft_width": 8}),
    ("mode draft, typical, width 16", {"mode": "draft"}),
    ("mode draft, typical, width 32", {"mode": "draft", "draft_width": 32}),
    ("mode draft, exact, width 16", {"mode": "draft", "accept": "exact"}),
    ("mode auto", {"mode": "auto"}),
]
LONG: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("presence_penalty 0.5", {"presence_penalty": 0.5}),
    ("presence_penalty 2", {"presence_penalty": 2.0}),
    ("frequency_penalty 0.1", {"frequency_penalty": 0.1}),
    ("frequency_penalty 0.5", {"frequency_penalty": 0.5}),
    ("repetition_penalty 1.1", {"repetition_penalty": 1.1}),
    ("repetition_penalty 1.5", {"repetition_penalty": 1.5}),
    ("in_block_repetition", {"in_block_repetition": True}),
    ("no_repeat_ngram 4", {"no_repeat_ngram": 4}),
    ("dry_multiplier 1", {"dry_multiplier": 1.0}),
    ("loop_guard raise", {"loop_guard": "raise"}),
    ("loop_guard retry", {"loop_guard": "retry"}),
    ("loop_guard stop", {"loop_guard": "stop"}),
]
LONG_TOKENS = 512
PROMPTS = ("Once upon a time", "The numbers are", "Tell me a long story about a fox.")
REPEATED = 4
"""Tokens of the n-grams whose repeats are counted."""


def line(*cells: object) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def scored(session: Session, settings: Settings, name: str, *, questions: int, seed: int) -> str:
    """A rule's line: accuracy, tokens a preview, tokens a forward."""
    session.generator.settings = settings
    print(f"\r{name:40}", end="", file=sys.stderr)
    examples = held_out(seed, per_family=questions)
    got = score(session.generator, session.opened.tokenizer, examples)
    previews = got.tokens_per_preview
    return line(
        name,
        f"{100 * got.accuracy():.1f}",
        "" if previews is None else f"{previews:.2f}",
        f"{got.tokens_per_forward:.2f}",
    )


def repeated(session: Session, settings: Settings, name: str) -> str:
    """A control's line: how much of long texts are n-grams that were there before, and doubles."""
    session.generator.settings = settings
    repeats, ngrams, doubles, tokens, ends = 0, 0, 0, 0, list[str]()
    for prompt in PROMPTS:
        session.generator.state.reset()
        for _ in session.generator.run(session.opened.tokenizer.encode(prompt)):
            pass
        result = session.generator.result
        if result is None:
            raise RuntimeError("a run ended without a result")
        ids = result.token_ids
        made = [ids[at : at + REPEATED] for at in range(len(ids) - REPEATED + 1)]
        repeats += len(made) - len(set(made))
        ngrams += len(made)
        doubles += sum(a == b for a, b in pairwise(ids))
        tokens += len(ids)
        ends.append(result.finish_reason)
    share = f"{100 * repeats / ngrams:.1f}" if ngrams else ""
    return line(name, share, f"{100 * doubles / tokens:.1f}", tokens, ", ".join(ends))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder of a checkpoint")
    parser.add_argument("--questions", type=int, default=5, help="held-out questions a family")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    opened = open_model(given.model)
    settings = replace(resolve(opened.config, opened.generation, {}).settings, max_new_tokens=256)
    session = load(opened, settings, device="cpu")
    asked = {"questions": given.questions, "seed": given.seed}
    print(line("rule or mode", "right, %", "tokens per preview", "tokens per forward"))
    print(line("---", *["---:"] * 3))
    for rule, knob, values in RULES:
        for value in values:
            changed = replace(settings, sampler=rule, **{knob: value})
            name = f"{rule}, {knob.removeprefix('sampler_')} {value}"
            print(scored(session, changed, name, **asked), flush=True)
    for name, changes in OTHERS:
        print(scored(session, replace(settings, **changes), name, **asked), flush=True)
    # Nothing but the context or the limit ends these texts, and no penalty of the model's acts.
    banned = tuple(settings.stop_ids)
    free = replace(
        settings,
        max_new_tokens=LONG_TOKENS,
        suppress=banned,
        length_penalty=0.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
    )
    repeats = f"repeated {REPEATED}-grams, %"
    print("\n" + line("control", repeats, "equal neighbours, %", "tokens", "ended by"))
    print(line("---", *["---:"] * 3, "---"))
    for name, changes in LONG:
        print(repeated(session, replace(free, **changes), name), flush=True)


if __name__ == "__main__":
    main()
