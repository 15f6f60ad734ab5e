"""What `clover-local pull` makes of a hub that refuses, and of one that is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest

Call = Callable[..., Any]


@pytest.fixture
def filled(hub: Any) -> Any:
    """A hub whose model has two small files."""
    hub.put("config.json", b"{}")
    hub.put("model.safetensors", b"weights")
    return hub


@pytest.mark.parametrize(
    ("arguments", "refusal", "words"),
    [
        (("owner/other",), None, "neither a folder nor a public model on the hub"),
        (("owner/name", "--revision", "v9"), None, "owner/name has no revision v9"),
        (("owner/name@v9",), None, "owner/name has no revision v9"),
        (("owner/name",), (403, "GatedRepo"), "is gated: accept its terms on http://127.0.0.1"),
        (("owner/name",), (401, "RepoNotFound"), "run `hf auth login` for a private one"),
        (("owner/name",), (403, ""), "to this token (403): correct HF_TOKEN"),
        (("owner/name",), (418, ""), "the download of owner/name stopped (Client error '418"),
        (("owner/name",), (200, ""), "expected a string): correct HF_ENDPOINT"),
        (("owner",), None, "is no hub id: it is owner/name"),
        (("a b/c",), None, "is no hub id"),
        (("a--b/c",), None, "no possible hub id"),
        (("demo",), None, "is on this machine already"),
    ],
    ids=[
        "404",
        "revision",
        "@revision",
        "gated",
        "401",
        "403",
        "418",
        "no hub",
        "short",
        "space",
        "dashes",
        "demo",
    ],
)
def test_a_refusal_is_one_line_with_the_remedy(
    run: Call, filled: Any, arguments: tuple[str, ...], refusal: Any, words: str
) -> None:
    filled.refusals = [refusal] if refusal else []
    outcome = run("pull", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert words in outcome.err


def test_a_list_with_a_path_for_a_hash_is_refused(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(filled), "hash", lambda self, name: "../../../x")
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "'blobId' is '../../../x', expected 40 hexadecimal digits" in outcome.err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"\xff", "no JSON object"),
        (b"{}", "its answer: 'sha' is None, expected a string"),
        ({"sha": "main"}, "'sha' is 'main', expected 40 hexadecimal digits"),
        ({"siblings": 3}, "'siblings' is 3, expected a list of objects"),
        ({"siblings": ["a"]}, "expected an object"),
        ({"siblings": [{}]}, "its file 0: 'rfilename' is None"),
        ({"siblings": [{"rfilename": "../x"}]}, "the path of a file below the model's folder"),
        ({"siblings": [{"rfilename": "x", "blobId": "c" * 40}]}, "'size' is None"),
        ({"siblings": [{"rfilename": "x", "lfs": 1}]}, "'lfs' is 1, expected an object"),
        ({"siblings": [{"rfilename": "x", "lfs": {}}]}, "its file 0, lfs: 'sha256' is None"),
    ],
)
def test_an_answer_of_no_hub_is_one_line_that_says_why(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch, answer: Any, words: str
) -> None:
    if isinstance(answer, dict):
        answer = json.dumps({"sha": filled.commit, **answer}).encode()
    monkeypatch.setattr(type(filled), "listing", lambda self: answer)
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "does not answer as a hub does (" in outcome.err
    assert words in outcome.err
    assert filled.asked == []


def test_a_bug_of_this_package_is_not_taken_for_an_answer_of_no_hub(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(repository: str, revision: str | None) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr("clover_local.remote._answer", broken)
    assert "a fault of clover-local" in run("pull", "owner/name").err
