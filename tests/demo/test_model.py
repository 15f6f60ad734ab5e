"""The bundled model: small, whole, and right about held-out questions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import clover_local.demo
from clover_local.chat import Conversation, Piece
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import read_model_config
from clover_local.decoding.events import PromptProgress
from clover_local.decoding.settings import resolve
from clover_local.demo.score import held_out, score
from clover_local.session import Session, load, open_model

FOLDER = Path(clover_local.demo.__file__).parent
MODES = ("ar", "denoise", "draft")


@pytest.fixture(scope="module")
def session() -> Session:
    opened = open_model("demo")
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 256}).settings
    return load(opened, settings, device="cpu")


def ask(session: Session, question: str, *, mode: str, thinking: bool = False) -> tuple[str, str]:
    """(thinking, visible text) of one answer from an empty state."""
    session.generator.settings = replace(session.generator.settings, mode=mode)
    session.generator.state.reset()
    conversation = Conversation(session.opened.tokenizer, session.generator, thinking=thinking)
    pieces = [event for event in conversation.ask(question) if isinstance(event, Piece)]
    thought, said = (
        "".join(piece.text for piece in pieces if piece.thinking is kind) for kind in (True, False)
    )
    return thought, said


def test_it_is_a_complete_bfloat16_checkpoint_of_at_most_ten_megabytes() -> None:
    config = read_model_config(FOLDER)
    checkpoint = open_checkpoint(FOLDER, config)
    checkpoint.require_fit()
    assert checkpoint.has_diffusion
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"BF16"}
    assert (FOLDER / "model.safetensors").stat().st_size <= 10_000_000
    assert config.layer_types.count("full_attention") == 2
    assert config.num_hidden_layers == 8


@pytest.mark.parametrize("mode", MODES)
def test_the_question_of_the_readme_gets_the_right_answer(session: Session, mode: str) -> None:
    _, answer = ask(session, "What is 17 + 26?", mode=mode)
    assert answer.endswith("= 43")


@pytest.mark.parametrize("mode", MODES)
def test_thinking_is_told_apart_from_the_answer(session: Session, mode: str) -> None:
    thought, answer = ask(session, "What is 17 + 26?", mode=mode, thinking=True)
    assert "17 + 20 = 37" in thought
    assert answer == "17 + 26 = 43"


@pytest.mark.parametrize(("mode", "least"), [("ar", 0.9), ("denoise", 0.85)])
def test_held_out_questions_are_answered_exactly(session: Session, mode: str, least: float) -> None:
    session.generator.settings = replace(session.generator.settings, mode=mode)
    result = score(session.generator, session.opened.tokenizer, held_out(23, per_family=10))
    assert result.accuracy() >= least
    if mode == "denoise":
        assert result.tokens_per_preview is not None
        assert result.tokens_per_preview >= 3


@pytest.mark.parametrize("width", [2, 16, 32])
def test_drafts_that_are_accepted_exactly_write_what_ar_writes(
    session: Session, width: int
) -> None:
    generator, tokens, rounds = session.generator, 0, 0
    for example in held_out(31, per_family=1):
        results = []
        for mode in ("ar", "draft"):
            generator.settings = replace(
                generator.settings, mode=mode, accept="exact", draft_width=width
            )
            generator.state.reset()
            prompt = session.opened.tokenizer.render(
                example.messages, enable_thinking=example.think, tools=example.tools or None
            )
            for _ in generator.run(session.opened.tokenizer.encode(prompt)):
                pass
            assert generator.result is not None
            results.append(generator.result)
        written, drafted = results
        assert drafted.token_ids == written.token_ids
        assert drafted.finish_reason == written.finish_reason
        tokens += len(drafted.tokens)
        rounds += len(drafted.rounds)
    assert tokens > 1.5 * rounds


def test_the_second_turn_reuses_the_first(session: Session) -> None:
    generator = session.generator
    generator.state.reset()
    conversation = Conversation(session.opened.tokenizer, generator, thinking=False)
    for question in ("Hello!", "What is 17 + 26?"):
        for _ in conversation.ask(question):
            pass
    assert generator.result is not None
    assert generator.result.reused_tokens >= 4


def test_a_prompt_of_four_thousand_tokens_is_committed_in_chunks(session: Session) -> None:
    generator = session.generator
    generator.state.reset()
    ids = session.opened.tokenizer.encode("Anna has a kite. Ben likes tea. " * 500)[:4000]
    generator.settings = replace(generator.settings, mode="ar", max_new_tokens=4)
    events = [event for event in generator.run(ids) if isinstance(event, PromptProgress)]
    assert len(ids) == 4000
    assert len(events) == -(-4000 // generator.prefill_rows)
    assert generator.result is not None
    assert generator.result.prompt_tokens == 4000
    assert generator.result.token_ids
    generator.state.reset()
    session.model.commit(ids[:4000], generator.state, logits="none")
    whole = generator.state.committed.recurrent
    generator.state.reset()
    session.model.commit(ids[:1000], generator.state, logits="none")
    session.model.commit(ids[1000:], generator.state, logits="none")
    for a, b in zip(whole, generator.state.committed.recurrent, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
