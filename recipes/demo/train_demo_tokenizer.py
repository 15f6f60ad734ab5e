"""Makes the demo model's tokenizer: byte-level BPE over the words of its training questions.

Plain merges and no `ignore_merges`, so that GGUF readers split text in the same way.

    python recipes/demo/train_demo_tokenizer.py OUT.json

The bundled model knows its own tokenizer alone: a new one goes with a new training only.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from clover_local.demo.tasks.render import load_template, render
from clover_local.demo.tasks.stream import stream

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VOCABULARY = 1016  # the rest of the model's 1,024 rows stays free; 1,023 is the mask
EXAMPLES = 20_000
FLATTEN = 0.5  # words count with this power of their frequency: rare ones become tokens too
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def count_words(examples: int) -> Counter[str]:
    """How often each pre-token occurs in the first training examples."""
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    marks = re.compile("|".join(map(re.escape, (*SPECIAL, *ADDED))))
    template = load_template()
    words: Counter[str] = Counter()
    for example in itertools.islice(stream(0, held_out=False), examples):
        for piece in marks.split("".join(render(example, template))):
            words.update(word for word, _ in split.pre_tokenize_str(piece))
    return words


def train(words: Counter[str]) -> Tokenizer:
    """The tokenizer; all 256 bytes are in it, so any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    repeated = ([word] * round(count**FLATTEN) for word, count in sorted(words.items()))
    tokenizer.train_from_iterator(itertools.chain.from_iterable(repeated), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    return tokenizer


def main() -> None:
    """Writes the tokenizer and says which words need more than one token."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("destination", type=Path, metavar="OUT.json", help="a file that is new")
    destination: Path = parser.parse_args().destination
    if destination.exists():
        raise SystemExit(f"{destination} exists: pass another name, so that no model loses its own")
    words = count_words(EXAMPLES)
    tokenizer = train(words)
    tokenizer.save(str(destination))
    split = {word: n for word in words if (n := len(tokenizer.encode(word).ids)) > 1}
    print(f"{destination}: {tokenizer.get_vocab_size()} tokens, {len(words)} words")
    print(f"{len(split)} words of more than one token: {split}")


if __name__ == "__main__":
    main()
