"""llama.cpp itself, in the wheel xllamacpp, runs what we export and says what our model says."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.decoding.settings import resolve
from clover_local.session import Session, load, open_model
from tests.gguf.conftest import ExportTo

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"
    ),
    pytest.mark.slow,
]

TEXTS = (
    "Hello there, what is 12 + 30?",
    "I'VE 3 apples.\n\n  Don't you?\tTabs  and   spaces",
    "naïve café <|im_start|>user\nHi<|im_end|>\n<think>\n",
)
PROMPTS = ((5,), (72, 101), (200, 17, 3, 90, 41), tuple(range(100, 160)))


@dataclass(frozen=True)
class Said:
    """What llama.cpp says: likeliest tokens with log-probabilities, lengths of texts."""

    likeliest: list[list[tuple[int, float]]]
    lengths: list[int]
    continued: list[list[tuple[int, float]]]


Ask = Callable[[Path], Said]


@pytest.fixture(scope="module")
def ask() -> Ask:
    def run(path: Path) -> Said:
        task = {"model": str(path), "prompts": PROMPTS, "texts": TEXTS}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("llama.py"))],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        tops = {
            key: [[(int(token), value) for token, value in top] for top in answer[key]]
            for key in ("likeliest", "continued")
        }
        return Said(tops["likeliest"], answer["lengths"], tops["continued"])

    return run


def session(model: str) -> Session:
    opened = open_model(model)
    settings = resolve(opened.config, opened.generation, {}).settings
    return load(opened, settings, context=256, device="cpu")


def largest_difference(ours: Session, said: list[list[tuple[int, float]]]) -> float:
    """Between log-probabilities of llama.cpp's 20 likeliest tokens, over all prompts."""
    worst = 0.0
    for prompt, top in zip(PROMPTS, said, strict=True):
        state = SequenceState(ours.opened.config, context=256, device="cpu", dtype=torch.float32)
        logits = ours.model.commit(list(prompt), state, logits="last").logits[-1]
        expected = logits.log_softmax(-1)
        assert len(top) == 20
        worst = max(worst, *(abs(float(expected[token]) - value) for token, value in top))
    return worst


@pytest.fixture(scope="module")
def demo() -> Session:
    return session("demo")


def test_float32_gives_our_log_probabilities_and_our_tokens(
    demo: Session, ask: Ask, export_to: ExportTo, tmp_path: Path
) -> None:
    said = ask(export_to("demo", tmp_path / "x.gguf"))
    assert largest_difference(demo, said.likeliest) < 2e-3
    ids = [demo.opened.tokenizer.encode(text) for text in TEXTS]
    assert said.lengths == [len(tokens) for tokens in ids]
    for tokens, top in zip(ids, said.continued, strict=True):  # the same ids, not only as many
        state = SequenceState(demo.opened.config, context=256, device="cpu", dtype=torch.float32)
        expected = demo.model.commit(tokens, state, logits="last").logits[-1].log_softmax(-1)
        assert max(abs(float(expected[token]) - value) for token, value in top) < 2e-3


def test_embedded_diffusion_parameters_change_nothing_there(
    ask: Ask, export_to: ExportTo, tmp_path: Path
) -> None:
    files = [
        export_to("demo", tmp_path / f"{place}.gguf", diffusion=place)
        for place in ("embed", "none")
    ]
    assert ask(files[0]) == ask(files[1])


def test_the_golden_model_by_token_ids(
    golden_folder: Path, ask: Ask, export_to: ExportTo, tmp_path: Path
) -> None:
    said = ask(export_to(str(golden_folder), tmp_path / "x.gguf"))
    assert largest_difference(session(str(golden_folder)), said.likeliest) < 2e-3
