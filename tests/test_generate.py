"""Whole runs of the golden checkpoint: golden runs, turns, interrupts, limits, traces."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import ModelConfig, parse_generation_config
from clover_local.decoding.events import BlockCommitted, Finished, PassDone, PromptProgress
from clover_local.decoding.result import Round
from clover_local.decoding.settings import Settings, resolve
from clover_local.decoding.trace import Trace
from clover_local.errors import ContextError, SettingsError
from clover_local.experts.resident import ResidentExperts
from clover_local.generate import Generator, generate
from clover_local.model.clover import Clover

CASES = ["default", "parallel", "penalties", "pad_stops_and_suppressed", "ar", "ar_penalties"]
MODES = pytest.mark.parametrize("mode", ["denoise", "ar", "draft"])
QUESTION = [(7 * i + 7 * i * i + 7) % 500 for i in range(45)]  # its first block takes 19 passes
NEXT_QUESTION = [(11 * i + 3) % 500 for i in range(21)]


@pytest.fixture(scope="module")
def model(golden_folder: Path, golden_config: ModelConfig) -> Clover:
    loaded = load_parameters(open_checkpoint(golden_folder, golden_config), golden_config)
    return Clover(
        golden_config,
        loaded.parameters,
        experts=ResidentExperts(loaded.experts),
        device="cpu",
        dtype=torch.float32,
    )


def empty_state(model: Clover, context: int = 4000) -> SequenceState:
    return SequenceState(model.config, context=context, device="cpu", dtype=torch.float32)


def settings_of(
    model: Clover, values: Mapping[str, Any] | None = None, **flags: object
) -> Settings:
    """Settings with `values` as generation_config.json; threshold 0.12 fixes rows in parallel."""
    generation = parse_generation_config(values or {}, model.config, "the file")
    return resolve(model.config, generation, {"threshold": 0.12, **flags}).settings


def fresh(model: Clover, settings: Settings, prompt: list[int]) -> tuple[int, ...]:
    return generate(model, empty_state(model), settings, prompt).token_ids


@pytest.mark.parametrize("name", CASES)
def test_golden_run(name: str, model: Clover, golden_cases: Mapping[str, Any]) -> None:
    """Tokens, passes, fixed rows exactly; confidences to 1e-5."""
    (case,) = (run for run in golden_cases["runs"] if run["name"] == name)
    settings = settings_of(
        model,
        case["generation_config"],
        mode=case["mode"],
        max_new_tokens=case["max_new_tokens"],
        threshold=case.get("threshold"),
    )
    result = generate(model, empty_state(model), settings, golden_cases["prompt"])
    assert list(result.token_ids) == case["tokens"]
    if case["mode"] == "ar":
        return
    assert [len(block.passes) for block in result.blocks] == case["passes"]
    passes = [rows for block in result.blocks for rows in block.passes]
    for rows, expected in zip(passes, case["fixed_per_pass"], strict=True):
        assert [[fixed.row, fixed.token] for fixed in rows] == [row[:2] for row in expected]
        confidences = [fixed.confidence for fixed in rows]
        assert confidences == pytest.approx([row[2] for row in expected], abs=1e-5)


@MODES
@pytest.mark.parametrize("length", [1, 31, 32, 33, 1000])
def test_prompt_of_any_length_is_the_same_in_chunks(model: Clover, length: int, mode: str) -> None:
    prompt = [(13 * i + i * i) % 500 for i in range(length)]
    settings = settings_of(model, mode=mode, max_new_tokens=3)
    whole = fresh(model, settings, prompt)
    generator = Generator(model, empty_state(model), settings, prefill_rows=17)
    events = list(generator.run(prompt))
    progress = [event.committed for event in events if isinstance(event, PromptProgress)]
    assert progress == [*range(17, length, 17), length]
    assert isinstance(events[-1], Finished)
    assert events[-1].result.token_ids == whole
    assert len(whole) == 3


def test_prompt_with_the_mask_token_is_committed_like_any_other(model: Clover) -> None:
    mask = model.config.mask_token_id
    state = empty_state(model)
    result = generate(model, state, settings_of(model, max_new_tokens=5), [4, mask, mask, 9])
    assert state.committed.tokens == (4, mask, mask, 9, *result.token_ids)
    assert mask not in result.token_ids
    assert result.token_ids != fresh(model, settings_of(model, max_new_tokens=5), [4, 5, 6, 9])


@MODES
def test_second_turn_reuses_the_first_and_equals_a_fresh_run(model: Clover, mode: str) -> None:
    settings = settings_of(model, mode=mode, max_new_tokens=40)
    generator = Generator(model, empty_state(model), settings)
    first = drained(generator, QUESTION)
    longer = [*QUESTION, *first, *NEXT_QUESTION]
    second = drained(generator, longer)
    assert second == fresh(model, settings, longer)
    assert generator.result is not None
    assert generator.result.reused_tokens == 45 + (40 if mode == "denoise" else 39)


def test_turn_that_drops_the_earlier_answer_goes_back_to_the_prompts_end(model: Clover) -> None:
    """As a template does that strips thinking: the ids part right behind the first prompt."""
    settings = settings_of(model, max_new_tokens=33)
    generator = Generator(model, empty_state(model), settings)
    drained(generator, QUESTION)
    longer = [*QUESTION, *NEXT_QUESTION]
    assert drained(generator, longer) == fresh(model, settings, longer)
    assert generator.result is not None
    assert generator.result.reused_tokens == 45


def test_modes_may_change_between_turns(model: Clover) -> None:
    """The token that ar left pending is committed with the next prompt."""
    generator = Generator(
        model, empty_state(model), settings_of(model, mode="ar", max_new_tokens=5)
    )
    first = drained(generator, QUESTION)
    generator.settings = settings_of(model, max_new_tokens=40)
    longer = [*QUESTION, *first, 3]
    assert drained(generator, longer) == fresh(model, generator.settings, longer)


def drained(generator: Generator, prompt: list[int]) -> tuple[int, ...]:
    *_, last = generator.run(prompt)
    assert isinstance(last, Finished)
    return last.result.token_ids


class Interrupting:
    """The model, with Ctrl-C in the n-th forward (from 0), before or after its effect."""

    def __init__(self, model: Clover, *, forward: int, after: bool) -> None:
        self._model, self._forward, self._after, self._count = model, forward, after, 0
        self.config, self.can_preview, self.device = model.config, model.can_preview, model.device

    def offload_stats(self) -> None:
        pass

    def give_up_memory(self) -> None:
        pass

    def commit(self, *arguments: Any, **options: Any) -> Any:
        return self._interrupted(lambda: self._model.commit(*arguments, **options))

    def verify(self, *arguments: Any) -> Any:
        return self._interrupted(lambda: self._model.verify(*arguments))

    def accept(self, *arguments: Any) -> None:
        self._model.accept(*arguments)

    def preview(self, *arguments: Any) -> Any:
        return self._interrupted(lambda: self._model.preview(*arguments))

    def _interrupted(self, forward: Any) -> Any:
        due, self._count = self._count == self._forward, self._count + 1
        if due and not self._after:
            raise KeyboardInterrupt
        output = forward()
        if due:
            raise KeyboardInterrupt
        return output


@MODES
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("forward", [0, 1, 2, 3, 9, 21, 22, 23, 24, 25, 26])
def test_interrupted_forward_leaves_a_state_for_the_next_question(
    model: Clover, mode: str, forward: int, after: bool
) -> None:
    settings = settings_of(model, mode=mode, max_new_tokens=70)
    interrupting = Interrupting(model, forward=forward, after=after)
    generator = Generator(interrupting, empty_state(model), settings, prefill_rows=20)
    shown: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for event in generator.run(QUESTION):
            if isinstance(event, BlockCommitted):
                shown += event.tokens
    result = generator.result
    assert result is not None
    assert result.finish_reason == "cancelled"
    assert list(result.token_ids) == shown
    committed = list(generator.state.committed.tokens)
    if forward < 3:
        assert committed == QUESTION[: len(committed)]
    else:
        everything = [*QUESTION, *shown]
        pending = len(everything) - (mode != "denoise" and bool(shown))
        assert committed[:pending] == everything[:pending]
    for question in ([*QUESTION, *shown, *NEXT_QUESTION], NEXT_QUESTION):
        short = settings_of(model, mode=mode, max_new_tokens=3)
        generator.settings = short
        assert drained(generator, question) == fresh(model, short, question)


@pytest.mark.parametrize("kind", [PromptProgress, PassDone, BlockCommitted])
def test_closing_the_iterator_cancels_the_run(model: Clover, kind: type) -> None:
    settings = settings_of(model, max_new_tokens=70)
    generator = Generator(model, empty_state(model), settings, prefill_rows=20)
    events = generator.run(QUESTION)
    assert next(event for event in events if isinstance(event, kind))
    assert generator.result is None
    events.close()
    assert generator.result is not None
    assert generator.result.finish_reason == "cancelled"
    question = [*QUESTION, *generator.result.token_ids, 9]
    generator.settings = settings_of(model, max_new_tokens=33)
    assert drained(generator, question) == fresh(model, generator.settings, question)


def test_abandoned_run_does_not_overwrite_a_later_result(model: Clover) -> None:
    settings = settings_of(model, max_new_tokens=2)
    generator = Generator(model, empty_state(model), settings)
    abandoned = generator.run(QUESTION)
    next(abandoned)
    text = drained(generator, NEXT_QUESTION)
    abandoned.close()
    assert generator.result is not None
    assert generator.result.token_ids == text


@MODES
@pytest.mark.parametrize("asked", [1, 2, 3, 4, 10, 23, 24])
def test_should_stop_ends_the_run_between_forwards(model: Clover, mode: str, asked: int) -> None:
    answers = iter([False] * (asked - 1) + [True])
    settings = settings_of(model, mode=mode, max_new_tokens=70)
    generator = Generator(
        model, empty_state(model), settings, should_stop=lambda: next(answers), prefill_rows=20
    )
    *_, last = generator.run(QUESTION)
    assert isinstance(last, Finished)
    assert last.result.finish_reason == "cancelled"
    # 3 forwards of prompt, then one question a forward
    assert generator.state.length >= min(20 * (asked - 1), 45)
    if mode == "ar" and asked > 3:
        assert len(last.result.tokens) == asked - 4
    generator.should_stop = None
    generator.settings = settings_of(model, mode=mode, max_new_tokens=33)
    assert drained(generator, NEXT_QUESTION) == fresh(model, generator.settings, NEXT_QUESTION)


@MODES
def test_answer_that_runs_into_the_context_limit(model: Clover, mode: str) -> None:
    unstopped = {"suppress_tokens": [506, 507]}
    settings = settings_of(model, unstopped, mode=mode)
    result = generate(model, empty_state(model, context=45 + 39), settings, QUESTION)
    assert (result.finish_reason, len(result.tokens)) == ("context", 39)


@MODES
def test_prompt_over_the_context_names_both_numbers_and_the_remedy(
    model: Clover, mode: str
) -> None:
    generator = Generator(model, empty_state(model, context=45), settings_of(model, mode=mode))
    with pytest.raises(ContextError, match=r"45 tokens.*holds 45.*--context"):
        generator.run(QUESTION)
    assert len(drained(generator, QUESTION[:44])) == 1


@pytest.mark.parametrize("prompt, says", [([], "empty"), ([4, 512], "512.*0 to 511"), ([-1], "-1")])
def test_prompt_that_is_none_is_refused_at_once(
    model: Clover, prompt: list[int], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        Generator(model, empty_state(model), settings_of(model)).run(prompt)


@MODES
def test_same_seed_same_text(model: Clover, mode: str) -> None:
    def text(**flags: Any) -> tuple[int, ...]:
        return fresh(model, settings_of(model, mode=mode, max_new_tokens=20, **flags), QUESTION)

    drawn = text(temperature=0.8, top_p=0.95, seed=3)
    assert drawn == text(temperature=0.8, top_p=0.95, seed=3)
    assert drawn != text(temperature=0.8, top_p=0.95, seed=4)
    greedy = text()
    assert greedy == text(temperature=0.0, seed=3) == text(temperature=5.0, top_k=1, seed=3)


@MODES
def test_trace_tells_every_forward(model: Clover, tmp_path: Path, mode: str) -> None:
    settings = settings_of(model, mode=mode, max_new_tokens=40, presence_penalty=0.5)
    path = tmp_path / "trace.jsonl"
    with Trace(path, model_hash="abc") as trace:
        result = generate(model, empty_state(model), settings, QUESTION, trace=trace)
    header, prompt, *forwards, end = records(path)
    assert (header["record"], header["model_hash"]) == ("header", "abc")
    assert header["prompt_ids"] == QUESTION
    assert header["settings"]["presence_penalty"] == 0.5
    assert (prompt["record"], prompt["of"], prompt["tokens"]) == ("commit", "prompt", QUESTION)
    assert (end["record"], end["finish_reason"]) == ("end", "length")
    assert end["token_ids"] == list(result.token_ids)
    passes = [record for record in forwards if record["record"] == "pass"]
    commits = [record for record in forwards if record["record"] == "commit"]
    if mode == "draft":
        assert result.stats.commits == len(result.rounds)
        assert_records_rebuild_the_rounds(forwards, result.rounds)
        return
    assert len(commits) == result.stats.commits
    if mode == "ar":
        assert [record["fixed"][0]["token"] for record in passes] == list(result.token_ids)
    else:
        assert len(passes) == result.stats.previews
        assert_passes_rebuild_the_blocks(passes, result.blocks)
        assert all(len(record["coreset_sizes"]) == 4 for record in passes)
    assert passes[-1]["controls"]["presence_penalty"] == 0.5
    assert passes[-1]["controls"]["penalised_tokens"] > 0
    assert len(passes[0]["fixed"][0]["top"]) == 5


def assert_records_rebuild_the_rounds(
    forwards: list[dict[str, Any]], rounds: tuple[Round, ...]
) -> None:
    assert forwards[0]["fixed"][0]["reason"] == "next_token"
    told, drafts, length = [], list[int](), len(QUESTION)
    for record in forwards[1:]:
        tokens = [fixed["token"] for fixed in record["fixed"]]
        if record["record"] == "pass":
            assert record["start"] == length + 1
            assert {fixed["reason"] for fixed in record["fixed"]} == {"draft"}
            drafts = tokens
            continue
        assert (record["record"], record["start"]) == ("verify", length)
        assert record["tokens"][1:] == drafts
        reasons = [fixed["reason"] for fixed in record["fixed"]]
        assert reasons == ["accepted"] * record["accepted"] + ["boundary"]
        assert tokens[:-1] == drafts[: record["accepted"]]
        told.append(Round(len(record["tokens"]), tuple(drafts), record["accepted"], tokens[-1]))
        drafts, length = [], length + len(tokens)
    assert tuple(told) == rounds


def assert_passes_rebuild_the_blocks(passes: list[dict[str, Any]], blocks: Any) -> None:
    told = [
        [(fixed["row"], fixed["token"], fixed["confidence"]) for fixed in record["fixed"]]
        for record in passes
    ]
    assert told == [
        [(fixed.row, fixed.token, fixed.confidence) for fixed in rows]
        for block in blocks
        for rows in block.passes
    ]
    for earlier, record in itertools.pairwise(passes):
        if record["block"] == earlier["block"]:
            block = list(earlier["block_before"])
            for fixed in earlier["fixed"]:
                block[fixed["row"]] = fixed["token"]
            assert record["block_before"] == block
    reasons = {fixed["reason"] for record in passes for fixed in record["fixed"]}
    assert reasons == {"above_threshold", "most_confident"}


def test_interrupted_trace_has_whole_lines_and_an_end(model: Clover, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    interrupting = Interrupting(model, forward=4, after=False)
    with pytest.raises(KeyboardInterrupt), Trace(path, model_hash="abc") as trace:
        generate(interrupting, empty_state(model), settings_of(model), QUESTION, trace=trace)
    kinds = [record["record"] for record in records(path)]
    assert kinds == ["header", "commit", "pass", "pass", "pass", "end"]
    assert records(path)[-1]["finish_reason"] == "cancelled"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
