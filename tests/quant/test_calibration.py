"""Sequences with masked blocks: what the model reads, where the blocks lie, what is masked."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.errors import CloverError
from clover_local.quant.calibration import RATIOS, CalibrationSequence, make_sequences
from clover_local.quant.documents import Document, held_out_documents
from clover_local.session import OpenModel, open_model
from clover_local.tokenizer import Message, Tokenizer


@pytest.fixture(scope="module")
def demo() -> OpenModel:
    return open_model("demo")


def chat(*texts: str, kind: str = "chat", tools: Sequence[dict[str, object]] = ()) -> Document:
    """User and assistant by turns."""
    roles = ["user", "assistant"] * len(texts)
    messages: list[Message] = [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
    ]
    return Document(texts[0][:20], kind, tuple(messages), tuple(tools))


def sequences_of(
    model: OpenModel, *documents: Document, tokens: int = 10**6, seed: int = 1, length: int = 512
) -> tuple[CalibrationSequence, ...]:
    return make_sequences(
        documents,
        tokenizer=model.tokenizer,
        config=model.config,
        tokens=tokens,
        seed=seed,
        length=length,
    )


def restored(sequence: CalibrationSequence, block: int) -> tuple[int, ...]:
    """The sequence's own tokens of one of its blocks."""
    preview = sequence.previews[block]
    return sequence.tokens[preview.start : preview.start + preview.text_rows]


def test_answer_follows_the_generation_prompt_and_ends_its_turn(demo: OpenModel) -> None:
    (sequence,) = sequences_of(demo, chat("What is 3 + 4?", "3 + 4 = 7"))
    text = demo.tokenizer.decode(sequence.tokens, skip_special=False)
    assert text == (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n3 + 4 = 7<|im_end|>"
    )
    (block,) = sequence.previews
    answer = demo.tokenizer.decode(restored(sequence, 0), skip_special=False)
    assert answer == "3 + 4 = 7<|im_end|>"
    prompt = demo.tokenizer.render([{"role": "user", "content": "What is 3 + 4?"}])
    assert list(sequence.tokens[: block.start]) == demo.tokenizer.encode(prompt)


def test_thinking_is_part_of_the_answer(demo: OpenModel) -> None:
    (sequence,) = sequences_of(demo, chat("3 + 4", "<think>\n3 + 4 = 7\n</think>\n\n7"))
    answer = demo.tokenizer.decode(restored(sequence, 0), skip_special=False)
    assert answer == "3 + 4 = 7\n</think>\n\n7<|im_end|>"
    before = demo.tokenizer.decode(sequence.tokens[: sequence.previews[0].start])
    assert before.endswith("<think>\n")


def test_earlier_answers_have_blocks_of_their_own(demo: OpenModel) -> None:
    first = "<think>\na greeting\n</think>\n\nHello! How can I help?"
    (sequence,) = sequences_of(demo, chat("Good day", first, "3 + 4", "7"))
    answers = [
        demo.tokenizer.decode(restored(sequence, block), skip_special=False) for block in (0, 1)
    ]
    assert answers == ["Hello! How can I help?<|im_end|>", "7<|im_end|>"]


def test_tools_reach_the_template(demo: OpenModel) -> None:
    zone = {"properties": {"zone": {"type": "string"}}}
    tool: dict[str, object] = {"name": "clock", "parameters": zone}
    (sequence,) = sequences_of(demo, chat("Time?", "12:00", tools=[tool]))
    assert '{"name": "clock"' in demo.tokenizer.decode(sequence.tokens)


def test_chat_that_ends_with_the_user_is_read_to_its_end(demo: OpenModel) -> None:
    (sequence,) = sequences_of(demo, chat("Hello", "Hi!", "What is 3 + 4?"))
    assert demo.tokenizer.decode(sequence.tokens).endswith("What is 3 + 4?\n")
    assert len(sequence.previews) == 1


def test_blocks_tile_an_answer_and_padding_fills_the_last(demo: OpenModel) -> None:
    (sequence,) = sequences_of(demo, chat("Count", " ".join(map(str, range(60)))))
    starts = [block.start for block in sequence.previews]
    assert len(starts) > 2
    assert starts == list(range(starts[0], len(sequence.tokens), 32))
    assert sum(block.text_rows for block in sequence.previews) == len(sequence.tokens) - starts[0]
    for number, block in enumerate(sequence.previews):
        own = (*restored(sequence, number), *[demo.config.pad_token_id] * (32 - block.text_rows))
        assert len(block.tokens) == 32
        for row, token in enumerate(block.tokens):
            masked = row in block.masked
            assert token == (demo.config.mask_token_id if masked else own[row])


def test_without_any_padding_token_the_last_block_is_short(demo: OpenModel) -> None:
    bare = replace(demo, config=replace(demo.config, pad_token_id=None, eos_token_id=()))
    (sequence,) = sequences_of(bare, chat("What is 3 + 4?", "3 + 4 = 7"))
    (block,) = sequence.previews
    assert len(block.tokens) == block.text_rows < 32


def test_mask_ratios_go_round_and_are_kept(demo: OpenModel) -> None:
    documents = held_out_documents(demo.tokenizer)
    blocks = [block for s in sequences_of(demo, *documents) for block in s.previews]
    counts = Counter(block.ratio for block in blocks)
    assert set(counts) == set(RATIOS)
    assert max(counts.values()) - min(counts.values()) <= 1
    for block in blocks:
        text = [row for row in block.masked if row < block.text_rows]
        assert len(text) == max(round(block.ratio * block.text_rows), 1)
        assert block.masked == tuple(sorted(set(block.masked)))


def test_long_document_becomes_pieces_whose_first_block_is_the_prompt(demo: OpenModel) -> None:
    document = chat("Count", " ".join(map(str, range(100))))
    (whole,) = sequences_of(demo, document)
    pieces = sequences_of(demo, document, length=100)
    assert [len(piece.tokens) for piece in pieces[:-1]] == [100] * (len(pieces) - 1)
    assert sum((piece.tokens for piece in pieces), ()) == whole.tokens
    assert len(pieces) > 2
    for piece in pieces[1:-1]:
        assert [block.start for block in piece.previews] == [32, 64, 96]


def test_same_seed_same_sequences_and_another_seed_others(demo: OpenModel) -> None:
    documents = held_out_documents(demo.tokenizer)
    first = sequences_of(demo, *documents, tokens=500, seed=3)
    assert sequences_of(demo, *documents, tokens=500, seed=3) == first
    assert sequences_of(demo, *documents, tokens=500, seed=4) != first


def test_small_budget_sees_every_kind_and_stops(demo: OpenModel) -> None:
    documents = [chat(f"{kind} {i}", "Hello there", kind=kind) for kind in "abc" for i in range(50)]
    long = chat("d", "word " * 200, kind="d")
    sequences = sequences_of(demo, *documents, long, tokens=400, length=100)
    tokens = Counter[str]()
    for sequence in sequences:
        tokens[sequence.kind] += len(sequence.tokens)
    assert set(tokens) == set("abcd")
    assert min(tokens.values()) >= 60
    assert 400 <= sum(tokens.values()) < 500


def test_without_a_template_the_contents_are_plain_text(demo: OpenModel) -> None:
    bare = Tokenizer(demo.tokenizer._encoder, source=demo.folder, templates={}, special_tokens={})
    (sequence,) = sequences_of(replace(demo, tokenizer=bare), chat("Count", "1 2 3 " * 30))
    assert demo.tokenizer.decode(sequence.tokens) == "Count\n\n" + "1 2 3 " * 30
    assert sequence.previews[0].start == 32


def test_chat_that_the_template_refuses_is_named(demo: OpenModel) -> None:
    odd = Document("strange", "mine", ({"role": "critic", "content": "x"},))
    with pytest.raises(CloverError, match=r"document 'strange' of mine: .*unknown role"):
        sequences_of(demo, odd)


def test_text_without_a_sequence_is_refused(demo: OpenModel) -> None:
    with pytest.raises(CloverError, match="no sequence of two tokens"):
        sequences_of(demo, chat("a", "b"), length=1)
    with pytest.raises(CloverError, match="no sequence of two tokens"):
        sequences_of(demo)


@pytest.mark.parametrize(("tokens", "length"), [(0, 512), (10, 0), (10, 4097)])
def test_impossible_sizes_are_a_wrong_call(tokens: int, length: int, demo: OpenModel) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens in sequences of {length}"):
        sequences_of(demo, chat("a", "b"), tokens=tokens, length=length)


def test_sequence_for_a_causal_model_keeps_its_tokens_only(demo: OpenModel) -> None:
    (sequence,) = sequences_of(demo, chat("What is 3 + 4?", "7"))
    assert sequence.rows == len(sequence.tokens) + 32
    causal = sequence.without_previews()
    assert (causal.tokens, causal.previews) == (sequence.tokens, ())
    assert causal.rows == len(sequence.tokens)


def test_template_of_another_model_works_too(golden_folder: Path) -> None:
    golden = open_model(str(golden_folder))
    (sequence,) = sequences_of(golden, chat("Hello there", "Hi, how are you?"))
    assert restored(sequence, 0) == tuple(golden.tokenizer.encode("Hi, how are you?<|im_end|>"))
