"""Whole runs against a second statement of the decoding rules: plain loops over one row at a time.

Logits come from a random model of an odd shape (what they should be is tests/model's business); all
that is done with them is written down here once more, in float64 and by full sorts.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig, parse_generation_config
from clover_local.decoding.random import ACCEPT, BOUNDARY, PICK, uniform
from clover_local.decoding.settings import resolve
from clover_local.generate import generate
from clover_local.model.clover import Clover

MASK, THINK_END, PROMPT = 96, 7, [(5 * i * i + 3) % 96 for i in range(23)]
NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "dllm_length_penalty": 0.0,
    "dllm_length_penalty_start": 8192,
    "dllm_length_penalty_window": 8192,
    "dllm_think_end_bias": 0.0,
    "dllm_think_end_start": 4096,
    "dllm_think_end_window": 4096,
    "dllm_think_end_token_id": None,
    "eos_token_id": [94, 1],
    "stop_token_ids": [],
    "pad_token_id": 1,
    "suppress_tokens": [],
}
REPETITION = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
LENGTH = {
    "dllm_length_penalty": 4.5,
    "dllm_length_penalty_start": 10,
    "dllm_length_penalty_window": 24,
    "stop_token_ids": [94, 40],
}
THINKING = {
    "dllm_think_end_bias": 5.0,
    "dllm_think_end_start": 3,
    "dllm_think_end_window": 20,
    "dllm_think_end_token_id": THINK_END,
    "suppress_tokens": [1, 94, 40],
}
DRAWS = {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "seed": 2**40 + 11}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "repetition": (REPETITION, {}),
    "length": (LENGTH, {"max_new_tokens": 300}),
    "thinking": (THINKING, {}),
    "all-drawn": ({**REPETITION, **LENGTH, **THINKING}, {**DRAWS, "max_new_tokens": 53}),
    "drawn-from-everything": ({}, {"temperature": 1.3, "max_new_tokens": 17}),
    "to-the-end-of-the-context": ({"suppress_tokens": [1, 94]}, {"max_new_tokens": 300}),
}
CONTEXT, THRESHOLD = len(PROMPT) + 61, 0.1


@dataclass
class Written:
    """What a run should be."""

    tokens: list[int] = field(default_factory=list)
    passes: list[list[tuple[int, int, float]]] = field(default_factory=list)
    rounds: list[tuple[list[int], int, int]] = field(default_factory=list)
    finish_reason: str = ""


class Rules:
    """decoding.md, sections 1, 3 and 4, for every mode."""

    def __init__(self, model: Clover, controls: dict[str, Any], flags: dict[str, Any]) -> None:
        self.model, self.c = model, {**NEUTRAL, **controls}
        self.flags = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, **flags}
        pad = self.c["pad_token_id"]
        self.stops = {*self.c["eos_token_id"], *self.c["stop_token_ids"], pad}
        self.state = SequenceState(model.config, context=CONTEXT, device="cpu", dtype=torch.float32)
        self.run = Written()

    def denoise(self) -> Written:
        self.model.commit(PROMPT, self.state)
        while not self.run.finish_reason:
            block = [MASK] * min(self.model.config.block_size, CONTEXT - self.state.length)
            start, number = len(self.run.tokens), 0
            while MASK in block:
                logits = self.model.preview(block, self.state).logits.double().tolist()
                picks = [
                    (row, *self.pick(logits[row], start + row + 1, number=number, visible=block))
                    for row, token in enumerate(block)
                    if token == MASK
                ]
                sure = [pick for pick in picks if pick[2] > self.flags["threshold"]]
                self.run.passes.append(sure or [max(picks, key=lambda pick: (pick[2], -pick[0]))])
                for row, token, _ in self.run.passes[-1]:
                    block[row] = token
                number += 1
            self.model.commit(list(self.emitted(block)), self.state)
        return self.run

    def ar(self) -> Written:
        logits = self.model.commit(PROMPT, self.state).logits[-1].double().tolist()
        while True:
            token, _ = self.pick(logits, len(self.run.tokens) + 1, number=0, visible=[])
            (token,) = self.emitted([token])
            if self.run.finish_reason:
                return self.run
            logits = self.model.commit([token], self.state).logits[-1].double().tolist()

    def draft(self) -> Written:
        logits = self.model.commit(PROMPT, self.state).logits[-1].double().tolist()
        list(self.emitted([self.pick(logits, 1, number=0, visible=[])[0]]))
        while not self.run.finish_reason:
            so_far = len(self.run.tokens)
            room = min(self.flags["max_new_tokens"] - so_far, CONTEXT - len(PROMPT) - so_far)
            width = self.flags["draft_width"]
            while width > room:
                width //= 2
            drafts = self.drafts(width) if width > 1 else []
            tokens, accepted = list[int](), 0
            for row, logits in enumerate(self.causal_rows(drafts)):
                self.run.tokens[so_far:] = drafts[:row]
                scores = self.controlled(logits, so_far + row + 1, visible=[])
                draft = drafts[row] if row < len(drafts) else None
                token = self.judged(scores, so_far + row + 1, draft)
                tokens.append(token if token is not None else drafts[row])
                if token is not None:
                    break
                accepted += 1
            self.run.tokens[so_far:] = []
            self.run.rounds.append((drafts, accepted, tokens[-1]))
            self.model.commit([self.run.tokens[-1], *list(self.emitted(tokens))[:-1]], self.state)
        return self.run

    def drafts(self, width: int) -> list[int]:
        block = [self.run.tokens[-1]] + [MASK] * (width - 1)
        logits = self.model.preview(block, self.state).logits.double().tolist()
        length = len(self.run.tokens)
        rows = [self.controlled(logits[r], length + r, visible=block) for r in range(1, width)]
        return [scores.index(max(scores)) for scores in rows]

    def causal_rows(self, drafts: list[int]) -> list[list[float]]:
        """Logits behind the pending token and behind each draft, over a state made from nothing."""
        state = SequenceState(self.model.config, context=500, device="cpu", dtype=torch.float32)
        tokens = [*PROMPT, *self.run.tokens, *drafts]
        logits: list[list[float]] = (
            self.model.commit(tokens, state, logits="all").logits.double().tolist()
        )
        return logits[-len(drafts) - 1 :]

    def judged(self, scores: list[float], n: int, draft: int | None) -> int | None:
        """None for a draft that is accepted, else the boundary token."""
        flags = self.flags
        weights = [math.exp(x - max(scores)) for x in scores]
        p = [weight / sum(weights) for weight in weights]
        u = uniform(flags["seed"], n, pass_number=0, purpose=BOUNDARY)
        if flags["temperature"] > 0 and flags["accept"] == "exact":
            kept = self.kept(scores)
            share = dict(kept).get(-1 if draft is None else draft, 0.0)
            total = sum(weight for _, weight in kept)
            test = uniform(flags["seed"], n, pass_number=0, purpose=ACCEPT)
            if draft is not None and test < share / total:
                return None
            return self.walk([(t, weight) for t, weight in kept if t != draft], u)
        own = scores.index(max(scores)) if flags["temperature"] == 0 else None
        if draft is not None and flags["accept"] == "exact" and draft == own:
            return None
        if draft is not None and flags["accept"] == "typical":
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            if p[draft] >= min(0.4, 0.3 * math.exp(-entropy)):
                return None
        return own if own is not None else self.walk(self.kept(scores), u)

    def emitted(self, block: Sequence[int]) -> Iterator[int]:
        """The tokens of a resolved block that count."""
        for token in block:
            self.run.tokens.append(token)
            yield token
            if token in self.stops:
                self.run.finish_reason = "stop"
            elif len(self.run.tokens) == self.flags["max_new_tokens"]:
                self.run.finish_reason = "length"
            elif len(PROMPT) + len(self.run.tokens) == CONTEXT:
                self.run.finish_reason = "context"
            if self.run.finish_reason:
                return

    def pick(
        self, logits: Sequence[float], n: int, *, number: int, visible: Sequence[int]
    ) -> tuple[int, float]:
        """Token and confidence of one row."""
        scores = self.controlled([*logits], n, visible=visible)
        weights = [math.exp(x - max(scores)) for x in scores]
        if self.flags["temperature"] == 0:
            token = scores.index(max(scores))
        else:
            u = uniform(self.flags["seed"], n, pass_number=number, purpose=PICK)
            token = self.drawn(scores, u)
        return token, weights[token] / sum(weights)

    def controlled(self, scores: list[float], n: int, *, visible: Sequence[int]) -> list[float]:
        c = self.c
        for token in (MASK, *c["suppress_tokens"]):
            scores[token] = -math.inf
        for token, count in Counter(self.run.tokens).items():
            scores[token] -= count * c["frequency_penalty"]
            scores[token] -= c["presence_penalty"]
            r = c["repetition_penalty"]
            scores[token] = scores[token] * r if scores[token] < 0 else scores[token] / r
        for token in self.stops:
            scores[token] += self.ramp("dllm_length_penalty", n)
        end = c["dllm_think_end_token_id"]
        if end is not None and end not in self.run.tokens and end not in visible:
            scores[end] += self.ramp("dllm_think_end", n)
        return scores

    def ramp(self, name: str, n: int) -> float:
        strength = self.c[name if name in self.c else f"{name}_bias"]
        share = (n - self.c[f"{name}_start"]) / self.c[f"{name}_window"]
        return float(strength * min(max(share, 0.0), 1.0))

    def drawn(self, scores: Sequence[float], u: float) -> int:
        return self.walk(self.kept(scores), u)

    def kept(self, scores: Sequence[float]) -> list[tuple[int, float]]:
        """(token, weight) of what may be drawn, by falling weight."""
        scaled = [x / self.flags["temperature"] for x in scores]
        order = sorted(range(len(scores)), key=lambda i: (-scaled[i], i))
        if self.flags["top_k"]:
            cut = scaled[order[self.flags["top_k"] - 1]]
            order = [i for i in order if scaled[i] >= cut]
        weights = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
        before, kept = 0.0, list[tuple[int, float]]()
        for token, weight in zip(order, weights, strict=True):
            if not kept or before < self.flags["top_p"] * sum(weights):
                kept.append((token, weight))
            before += weight
        return kept

    def walk(self, kept: Sequence[tuple[int, float]], u: float) -> int:
        target, mass = u * sum(weight for _, weight in kept), 0.0
        for token, weight in kept:
            mass += weight
            if mass > target:
                return token
        return kept[-1][0]


@pytest.fixture(scope="module")
def model(odd_config: ModelConfig, random_model: Callable[[ModelConfig], Clover]) -> Clover:
    sizes = {"block_size": 16, "coreset_enabled": True, "coreset_top_p": 0.6}
    return random_model(replace(odd_config, **sizes))  # type: ignore[arg-type]


DRAFTS = {"accept": "typical", "accept_ratio": 0.4, "accept_delta": 0.3, "draft_width": 8}
MODES: dict[str, dict[str, Any]] = {
    "denoise": {"mode": "denoise"},
    "ar": {"mode": "ar"},
    "draft": {"mode": "draft", **DRAFTS},
    "draft-exact": {"mode": "draft", **DRAFTS, "accept": "exact", "draft_width": 16},
}


@pytest.mark.parametrize("named", MODES)
@pytest.mark.parametrize("case", CASES)
def test_run_is_what_the_rules_say(case: str, named: str, model: Clover) -> None:
    controls, given = CASES[case]
    flags = {"max_new_tokens": 50, "threshold": THRESHOLD, **given, **MODES[named]}
    written: Written = getattr(Rules(model, controls, flags), flags["mode"])()
    neutral = {key: NEUTRAL[key] for key in ("eos_token_id", "pad_token_id")}
    generation = parse_generation_config({**neutral, **controls}, model.config, "the file")
    settings = resolve(model.config, generation, flags).settings
    state = SequenceState(model.config, context=CONTEXT, device="cpu", dtype=torch.float32)
    result = generate(model, state, settings, PROMPT)
    assert list(result.token_ids) == written.tokens
    assert result.finish_reason == written.finish_reason
    assert [(list(r.draft), r.accepted, r.boundary) for r in result.rounds] == written.rounds
    passes = [rows for block in result.blocks for rows in block.passes]
    assert [[(f.row, f.token) for f in rows] for rows in passes] == [
        [(row, token) for row, token, _ in rows] for rows in written.passes
    ]
    assert [f.confidence for rows in passes for f in rows] == pytest.approx(
        [confidence for rows in written.passes for _, _, confidence in rows], abs=1e-5
    )


AT_ZERO = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 0.0,
    "length_penalty_start": -9,
    "length_penalty_window": 1,
    "think_end_bias": 0.0,
    "think_end_start": -9,
    "think_end_window": 1,
    "min_new_tokens": 0,
    "in_block_repetition": False,
    "no_repeat_ngram": 0,
    "dry_multiplier": 0.0,
    "dry_base": 9.0,
    "dry_allowed": 1,
    "dry_breakers": (3,),
    "eos_order": False,
    "loop_guard": "off",
    "sampler_threshold_decay": 0.0,
    "sampler_min_per_pass": 0,
    "sampler_max_per_pass": 0,
    "sampler_finish_gap": False,
}


@pytest.mark.parametrize("drawn", [{}, DRAWS], ids=["greedy", "drawn"])
@pytest.mark.parametrize("named", MODES)
def test_every_control_at_strength_zero_changes_no_bit(
    named: str, drawn: dict[str, Any], model: Clover
) -> None:
    """Tokens, confidences, passes and rounds; the model has a token that ends thinking."""
    generation = parse_generation_config(
        {"dllm_think_end_token_id": THINK_END, "eos_token_id": 94}, model.config, "the file"
    )
    results = []
    for controls in ({}, AT_ZERO):
        flags = {"max_new_tokens": 40, "threshold": THRESHOLD, **drawn, **MODES[named], **controls}
        settings = resolve(model.config, generation, flags).settings
        state = SequenceState(model.config, context=CONTEXT, device="cpu", dtype=torch.float32)
        results.append(generate(model, state, settings, PROMPT))
    without, at_zero = results
    assert at_zero.tokens == without.tokens and len(without.tokens) > 5
    assert (at_zero.blocks, at_zero.rounds) == (without.blocks, without.rounds)
