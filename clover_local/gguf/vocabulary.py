"""The tokenizer as GGUF metadata, and back: byte-level BPE, as of Qwen's models.

llama.cpp knows the pattern that cuts a text into words by a name (`tokenizer.ggml.pre`) and
normalizes nothing; the patterns are those of the tokenizer files that the names were given for.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from clover_local.errors import CheckpointError, TokenizerError
from clover_local.gguf.container import MetaValue
from clover_local.gguf.values import Values

MODEL = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
TEMPLATE = "tokenizer.chat_template"
SPECIAL_IDS = {  # in tokenizer_config.json: in a file
    "eos_token": "tokenizer.ggml.eos_token_id",
    "bos_token": "tokenizer.ggml.bos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
MASK_ID = "tokenizer.ggml.mask_token_id"

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "qwen35": (
        _CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        + _SPACES
    ),
    "qwen2": (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
    ),
}
BYTE_LEVEL_NAME = "gpt-2"  # the pattern of the `ByteLevel` pre-tokenizer itself


def vocabulary_metadata(
    tokenizer_json: str, *, vocab_size: int, source: str
) -> dict[str, MetaValue]:
    """Tokens, their types and the merges of a `tokenizer.json`, for `vocab_size` ids.

    Raises:
        TokenizerError: not byte-level BPE, or words cut by a pattern that llama.cpp has no name
            for.
    """
    values: dict[str, Any] = json.loads(tokenizer_json)
    model = values.get("model", {})
    if model.get("type") != "BPE":
        raise TokenizerError(
            f"{source}: the tokenizer is {model.get('type')}, a GGUF file of this architecture "
            "holds BPE: use the tokenizer of a Clover checkpoint"
        )
    tokens = [f"[PAD{token}]" for token in range(vocab_size)]
    types = np.full(vocab_size, UNUSED, "<i4")
    for spelling, token in model["vocab"].items():
        tokens[token], types[token] = spelling, NORMAL
    for added in values.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())
    ]
    return {
        MODEL: "gpt2",
        PRE: _pattern_name(values.get("pre_tokenizer"), source),
        TOKENS: tokens,
        TOKEN_TYPES: types,
        MERGES: merges,
    }


def tokenizer_json(metadata: Mapping[str, MetaValue], source: str) -> str:
    """A `tokenizer.json` for the tokenizer in a GGUF file.

    Raises:
        CheckpointError: none in the file, or one of another kind.
    """
    values = Values(metadata, source)
    model, pre = values.text(MODEL), values.text(PRE, "default")
    if model != "gpt2" or pre not in (*PATTERNS, BYTE_LEVEL_NAME):
        raise CheckpointError(
            f"{source}: the tokenizer is {model} with the words of {pre}, this runtime reads gpt2 "
            f"with those of {', '.join((*PATTERNS, BYTE_LEVEL_NAME))}: use the file of a Qwen model"
        )
    tokens, merges = values.texts(TOKENS), values.texts(MERGES)
    types = values.integers(TOKEN_TYPES, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{source}: {len(types)} token types for {len(tokens)} tokens: download it again"
        )
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise CheckpointError(f"{source}: {MERGES} holds what is no pair: download it again")
    added = [
        _added(token, spelling, special=kind == CONTROL)
        for token, (spelling, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    vocabulary = {
        spelling: token
        for token, (spelling, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in (CONTROL, USER_DEFINED, UNUSED)
    }
    pattern = PATTERNS.get(pre)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if pattern else None,
            "pre_tokenizer": _pre_tokenizer(pattern),
            "post_processor": None,
            "decoder": _byte_level(use_regex=False),
            "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
        }
    )


def _pattern_name(pre_tokenizer: Any, source: str) -> str:
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return BYTE_LEVEL_NAME
    if kinds == ["Split", "ByteLevel"]:
        pattern = parts[0].get("pattern", {}).get("Regex")
        for name, known in PATTERNS.items():
            if pattern == known:
                return name
    raise TokenizerError(
        f"{source}: the tokenizer cuts words by a pattern that llama.cpp has no name for among "
        f"{', '.join((*PATTERNS, BYTE_LEVEL_NAME))}: use the tokenizer of a Qwen model"
    )


def _pre_tokenizer(pattern: str | None) -> dict[str, object]:
    if pattern is None:
        return _byte_level(use_regex=True)
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _byte_level(*, use_regex: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _added(token: int, spelling: str, *, special: bool) -> dict[str, object]:
    return {
        "id": token,
        "content": spelling,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
