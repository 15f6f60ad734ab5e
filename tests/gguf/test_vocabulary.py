"""The tokenizer to GGUF metadata and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from clover_local.errors import CheckpointError, TokenizerError
from clover_local.gguf.container import MetaValue
from clover_local.gguf.vocabulary import tokenizer_json, vocabulary_metadata
from clover_local.hub import locate
from clover_local.tokenizer import Tokenizer

TEXTS = (
    "Hello there, what is 12 + 30?",
    "I'VE 3 apples.\n\n  Don't you?\tTabs  and   spaces \r\n",
    "naïve café — 東京 🙂 e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n</think>",
    "",
    " ",
    "\n\n\n",
)


@pytest.fixture(params=["demo", "golden"])
def folder(request: pytest.FixtureRequest, golden_folder: Path) -> Path:
    return locate("demo") if request.param == "demo" else golden_folder


def metadata_of(folder: Path) -> dict[str, MetaValue]:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return vocabulary_metadata(
        Tokenizer.load(folder).to_json(), vocab_size=vocab_size, source="here"
    )


def test_the_way_there_and_back_gives_the_same_ids_and_texts(folder: Path) -> None:
    before = Tokenizer.load(folder)
    after = tokenizers.Tokenizer.from_str(tokenizer_json(metadata_of(folder), "there"))
    assert after.get_vocab() == before.vocabulary
    for text in TEXTS:
        ids = before.encode(text)
        assert after.encode(text, add_special_tokens=False).ids == ids
        for skip in (True, False):
            decoded = after.decode(ids, skip_special_tokens=skip)
            assert decoded == before.decode(ids, skip_special=skip)


def test_every_id_has_a_token_and_a_type() -> None:
    metadata = metadata_of(locate("demo"))
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, np.ndarray)
    assert len(tokens) == len(types) == 1024
    assert (tokens[1008], types[1008]) == ("<|im_start|>", 3)
    assert (tokens[1010], types[1010]) == ("<think>", 4)
    assert (tokens[1023], types[1023]) == ("[PAD1023]", 5)
    assert types[0] == 1
    assert len(set(tokens)) == 1024
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.pre"] == "qwen2"


def changed(folder: Path, change: dict[str, Any]) -> str:
    return json.dumps({**json.loads(Tokenizer.load(folder).to_json()), **change})


def test_what_the_format_cannot_hold_is_refused(golden_folder: Path) -> None:
    with pytest.raises(TokenizerError, match="the tokenizer is Unigram"):
        content = changed(golden_folder, {"model": {"type": "Unigram"}})
        vocabulary_metadata(content, vocab_size=512, source="here")
    for pre in (None, {"type": "Whitespace"}):
        content = changed(golden_folder, {"pre_tokenizer": pre})
        with pytest.raises(TokenizerError, match=r"a pattern that llama.cpp has no name for"):
            vocabulary_metadata(content, vocab_size=512, source="here")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("tokenizer.ggml.model", "llama", "the tokenizer is llama"),
        ("tokenizer.ggml.pre", "bloom", "with the words of bloom"),
        ("tokenizer.ggml.tokens", 7, "tokenizer.ggml.tokens is not a list of texts"),
        ("tokenizer.ggml.token_type", np.array([1, 2], "<i4"), "for 512 tokens: download"),
        ("tokenizer.ggml.merges", ["abc"], "no pair"),
        ("tokenizer.ggml.merges", None, "lacks the key tokenizer.ggml.merges"),
    ],
)
def test_bad_metadata_are_refused_in_one_line(
    key: str, value: MetaValue | None, complaint: str, golden_folder: Path
) -> None:
    metadata = metadata_of(golden_folder)
    if value is None:
        del metadata[key]
    else:
        metadata[key] = value
    with pytest.raises(CheckpointError, match=complaint):
        tokenizer_json(metadata, "x.gguf")
