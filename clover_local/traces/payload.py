"""A trace as the data of its page: plain JSON values, and every text made harmless to look at.

Tokens are numbered; their texts stand once, in `tokens`. Needs no torch.
"""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from clover_local.decoding.keys import KEYS
from clover_local.decoding.settings import Settings
from clover_local.traces.read import RecordedRun, Step

Decode = Callable[[Sequence[int]], str]

JOINERS = "\u200c\u200d"  # of scripts and emoji; other format characters may hide or turn text
DEFAULTS = Settings(mask_token_id=0, vocab_size=1)


def payload(
    runs: Sequence[RecordedRun], decode: Decode | None, *, usual: Settings = DEFAULTS
) -> dict[str, object]:
    """All that the page shows; `decode` gives tokens their text, None shows their ids.

    `usual` are the settings that a run of this model has unless told otherwise.
    """
    text = decode or (lambda ids: " ".join(map(str, ids)))
    return {
        "tokens": {token: visible(text([token])) for token in sorted(_tokens(runs))},
        "runs": [_run(run, text, usual) for run in runs],
    }


def visible(text: str) -> str:
    """`text` with control characters as pictures and those that hide or turn text as numbers."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    hides = category in ("Cf", "Cs", "Zl", "Zp") or (category == "Cc" and code >= 0x80)
    return f"⟨{code:04X}⟩" if hides and character not in JOINERS else character


def _tokens(runs: Iterable[RecordedRun]) -> set[int]:
    found: set[int] = set()
    for run in runs:
        found.update(run.token_ids)
        for step in run.steps:
            found.update(step.before)
            for picked in step.picked:
                found.add(picked.token)
                found.update(token for token, _ in picked.top)
    return found


def _run(run: RecordedRun, text: Decode, usual: Settings) -> dict[str, object]:
    header = run.header
    return {
        "model": visible(header.model) or "not recorded",
        "mode": visible(str(header.settings.get("mode", "unknown"))),
        "facts": _facts(run),
        "changed": _changed(header.settings, usual),
        "settings": _shown(header.settings),
        "stats": _shown(run.stats),
        "prompt": visible(text(header.prompt_ids)),
        "answer": visible(text(run.token_ids)),
        "finish": None if run.finish_reason is None else visible(run.finish_reason),
        "commitMs": round(run.commit_milliseconds, 3),
        "mask": header.settings.get("mask_token_id"),
        "choices": [[c.before_step, c.mode, c.is_probe, visible(c.why)] for c in run.choices],
        "steps": [_step(step) for step in run.steps],
    }


def _facts(run: RecordedRun) -> dict[str, str]:
    header = run.header
    facts = {
        "prompt": f"{len(header.prompt_ids)} tokens",
        "context": f"{header.context} tokens",
        "seed": str(header.settings.get("seed", "not recorded")),
        "device": f"{header.device} {header.dtype or ''}".strip(),
        "weights": header.model_hash,
        "versions": ", ".join(f"{name} {value}" for name, value in header.versions.items()),
    }
    return {name: visible(value) for name, value in facts.items()}


def _changed(settings: Mapping[str, object], usual: Settings) -> list[list[str]]:
    """[name, value, usual value] of the user's settings that differ."""
    values = asdict(usual)
    return [
        [name, visible(_value(value)), _value(values[name])]
        for name, value in settings.items()
        if name in KEYS and name in values and _value(value) != _value(values[name])
    ]


def _shown(values: Mapping[str, object]) -> dict[str, str]:
    return {visible(name): visible(_value(value)) for name, value in values.items()}


def _value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _step(step: Step) -> dict[str, object]:
    """One forward; `picked` is a list of [row, token, confidence, reason, [[token, share]]]."""
    return {
        "kind": step.kind,
        "mode": step.mode,
        "block": step.block,
        "start": step.start,
        "number": step.number,
        "before": step.before,
        "picked": [
            [p.row, p.token, round(p.confidence, 5), p.reason, [[t, round(s, 5)] for t, s in p.top]]
            for p in step.picked
        ],
        "ms": round(step.milliseconds, 3),
        "accepted": step.accepted,
        "coreset": step.coreset_sizes,
        "controls": _acting(step.controls),
    }


def _acting(controls: Mapping[str, object]) -> list[str]:
    """The controls that may change a logit of this forward, in words."""
    words = [
        f"{name.replace('_', ' ')} {_value(controls[name])}"
        for name, neutral in NEUTRAL.items()
        if controls.get(name, neutral) != neutral
    ]
    for name, word in LISTS.items():
        rows = controls.get(name)
        if isinstance(rows, list) and any(rows):
            words.append(word)
    return list(map(visible, words))


NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
LISTS = {
    "dry": "DRY penalties",
    "stop_banned": "end of text banned in some rows",
    "stop_bias": "length penalty",
    "think_end_bias": "end of thinking favoured",
}
