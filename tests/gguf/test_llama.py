"""llama.cpp itself, in the wheel xllamacpp, runs what we export and says what our model says."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.decoding.settings import resolve
from clover_local.gguf.export.ggml import find_ggml
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


Prompts = Sequence[Sequence[int]]


def ask(path: Path, prompts: Prompts = PROMPTS, texts: Sequence[str] = ()) -> Said:
    """Runs llama.cpp in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("llama.py"))],
        input=json.dumps({"model": str(path), "prompts": prompts, "texts": texts}),
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


def session(model: str) -> Session:
    opened = open_model(model)
    settings = resolve(opened.config, opened.generation, {}).settings
    return load(opened, settings, context=256, device="cpu")


def differences(
    ours: Session, prompts: Prompts, said: list[list[tuple[int, float]]]
) -> list[float]:
    """Between log-probabilities of llama.cpp's 20 likeliest tokens and ours, over all prompts."""
    found = []
    for prompt, top in zip(prompts, said, strict=True):
        state = SequenceState(ours.opened.config, context=256, device="cpu", dtype=torch.float32)
        logits = ours.model.commit(list(prompt), state, logits="last").logits[-1]
        expected = logits.log_softmax(-1)
        assert len(top) == 20
        found += [abs(float(expected[token]) - value) for token, value in top]
    return found


@pytest.fixture(scope="module")
def demo() -> Session:
    return session("demo")


def test_float32_gives_our_log_probabilities_and_our_tokens(
    demo: Session, export_to: ExportTo, tmp_path: Path
) -> None:
    said = ask(export_to("demo", tmp_path / "x.gguf"), texts=TEXTS)
    assert max(differences(demo, PROMPTS, said.likeliest)) < 2e-3
    ids = [demo.opened.tokenizer.encode(text) for text in TEXTS]
    assert said.lengths == [len(tokens) for tokens in ids]
    assert max(differences(demo, ids, said.continued)) < 2e-3  # the same ids, not only as many


def test_embedded_diffusion_parameters_change_nothing_there(
    export_to: ExportTo, tmp_path: Path
) -> None:
    embed, none = (
        export_to("demo", tmp_path / f"{place}.gguf", diffusion=place)
        for place in ("embed", "none")
    )
    assert ask(embed) == ask(none)


def test_the_golden_model_by_token_ids(
    golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    said = ask(export_to(str(golden_folder), tmp_path / "x.gguf"))
    assert max(differences(session(str(golden_folder)), PROMPTS, said.likeliest)) < 2e-3


def test_real_head_dimensions(wide_folder: Path, export_to: ExportTo, tmp_path: Path) -> None:
    said = ask(export_to(str(wide_folder), tmp_path / "x.gguf"))
    assert max(differences(session(str(wide_folder)), PROMPTS, said.likeliest)) < 2e-3


FILE_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS", "Q3_K_M")
NOISE = {"demo": 0.4, "golden": 0.1, "wide": 0.1}
"""The median difference between llama.cpp and us, both from the very same integers: it rounds what
a quantized matrix is multiplied with to 8 bits, and we do not. Where routing is a near tie another
expert is picked, so the largest difference says nothing. F16 rounds that to float16: 0.01.
"""
QUESTIONS = ("What is 12 + 30?", "Who are you?", "Tell me a short story.", "Is 7 more than 5?")


@pytest.mark.parametrize("file_type", FILE_TYPES)
@pytest.mark.parametrize("model", NOISE)
def test_other_types_load_and_differ_by_llama_cpps_own_rounding(
    model: str,
    file_type: str,
    golden_folder: Path,
    wide_folder: Path,
    export_to: ExportTo,
    tmp_path: Path,
) -> None:
    if find_ggml() is None and file_type not in ("F16", "Q8_0", "Q4_0"):
        pytest.skip("libggml-python is not installed")
    name = {"golden": str(golden_folder), "wide": str(wide_folder)}.get(model, model)
    path = export_to(name, tmp_path / "x.gguf", file_type=file_type)
    ours = session(str(path))
    tokenizer = ours.opened.tokenizer
    prompts = [
        tokenizer.encode(tokenizer.render([{"role": "user", "content": question}]) + tail)
        for question in QUESTIONS
        for tail in ("", "The answer")
    ]
    found = differences(ours, prompts, ask(path, prompts).likeliest)
    limit = 0.01 if file_type == "F16" else NOISE[model]
    assert sorted(found)[len(found) // 2] < limit
