"""The demo's questions and its tokenizer."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from clover_local.demo.tasks.example import Example, grade, is_held_out, may_train
from clover_local.demo.tasks.render import TEMPLATE, load_template, render
from clover_local.demo.tasks.stream import FAMILIES, stream

ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)


def draw(family: str, count: int, *, held_out: bool = False) -> list[Example]:
    """The first examples of one family."""
    source = stream(7, held_out=held_out, weights={family: 1.0})
    return list(itertools.islice(source, count))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The bundled tokenizer."""
    return Tokenizer.from_file(str(Path(TEMPLATE).with_name("tokenizer.json")))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_split_never_leaks(family: str) -> None:
    assert all(may_train(example) for example in draw(family, 300))
    assert all(is_held_out(example.key) for example in draw(family, 50, held_out=True))


def test_the_stream_repeats_with_its_seed_and_differs_with_another() -> None:
    first, again, other = (
        list(itertools.islice(stream(seed, held_out=False), 50)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="poems"):
        stream(0, held_out=False, weights={"poems": 1.0})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_renders_and_survives_the_tokenizer(family: str, tokenizer: Tokenizer) -> None:
    template = load_template()
    for example in draw(family, 100):
        prompt, response = render(example, template)
        assert prompt.endswith("<think>\n" if example.think else "<think>\n\n</think>\n\n")
        assert example.messages[-1]["content"] in prompt
        assert response.endswith(f"{example.answer}<|im_end|>")
        ids = tokenizer.encode(prompt + response).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt + response
        assert len(tokenizer.encode(prompt).ids) <= 150


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_right_and_another_is_not(family: str) -> None:
    for example in draw(family, 20):
        assert grade(example, f"{example.answer}<|im_end|>")
        assert grade(example, f"{example.reasoning}\n</think>\n\n{example.answer}\n")
        assert not grade(example, f"{example.answer} or not")
        assert not grade(example, "")


def test_sums_agree_with_arithmetic() -> None:
    for example in draw("sums", 300):
        asked, *_, result = example.answer.split(" = ")
        assert asked.replace(" ", "") == example.key
        for equation in (example.answer, *example.reasoning.splitlines()):
            assert len({eval(side) for side in equation.split(" = ")}) == 1
        assert int(result) == eval(example.key)


def test_an_earlier_turn_keeps_no_thinking() -> None:
    messages = [
        {"role": "user", "content": "17 + 26"},
        {"role": "assistant", "content": "<think>\n7 + 6 = 13\n</think>\n\n43"},
        {"role": "user", "content": "Bye"},
    ]
    text = load_template().render(messages=messages)
    assert "<|im_start|>assistant\n43<|im_end|>\n" in text


def test_a_call_written_by_the_client_renders_like_the_one_the_model_writes() -> None:
    call = {"function": {"name": "send_message", "arguments": {"to": "Ben", "text": "hi"}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    text = load_template().render(messages=messages)
    body = '{"name": "send_message", "arguments": {"to": "Ben", "text": "hi"}}'
    assert f"assistant\n<tool_call>\n{body}\n</tool_call><|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n" in text


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="no messages"):
        load_template().render(messages=[])


@pytest.mark.parametrize("token", ADDED)
def test_an_added_token_is_one_id(token: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


def test_digits_are_single_tokens_and_ids_stay_below_the_mask(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2026").tokens == list("2026")
    assert tokenizer.get_vocab_size() <= 1016
