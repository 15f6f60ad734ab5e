"""What `clover-local pull` makes of a hub that refuses, and of one that is none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

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
        (("owner/name",), (418, ""), "the hub refuses owner/name (Client error '418"),
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


PATH = "expected the path of a file below the model's folder"


def entry(name: Any = "x.json", **others: Any) -> dict[str, Any]:
    return {"rfilename": name, "blobId": "c" * 40, "size": 1, **others}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([{}], "its file 0: 'rfilename' is None"),
        ([entry("../x.json")], PATH),
        (
            [entry(), entry("a/../../x.json")],
            f"its file 1: 'rfilename' is 'a/../../x.json', {PATH}",
        ),
        ([entry("a//x.json")], PATH),
        ([entry("a/")], PATH),
        ([entry("")], PATH),
        ([entry("./x.json")], PATH),
        ([entry("a\0b.json")], PATH),
        ([entry("a\x1b]0;b.json")], PATH),
        ([entry("\ud800.json")], PATH),
        ([entry("C:/x.json")], PATH),
        ([entry("..\\x.json")], PATH),
        ([entry("ä" * 128 + ".json")], "expected parts of at most 255 bytes"),
        ([entry("a.json"), entry("a.json/b.json")], "'a.json' is a file and a folder"),
        ([entry(), entry(size=2)], "its file 1: 'x.json' is there twice"),
        ([entry(blobId="../../../x")], "'blobId' is '../../../x', expected 40 hexadecimal digits"),
        ([entry(size=None)], "'size' is None"),
        ([entry(size="many")], "'size' is 'many', expected a number of bytes"),
        ([entry(size=-5)], "'size' is -5, expected a number of bytes"),
        ([entry(size=10**30)], "expected a number of bytes"),
        ([entry(lfs=1)], "'lfs' is 1, expected an object"),
        ([entry(lfs={})], "its file 0, lfs: 'sha256' is None"),
    ],
)
def test_a_damaged_list_of_files_is_refused_before_anything_is_fetched(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch, files: Any, words: str
) -> None:
    answer = json.dumps({"sha": filled.commit, "siblings": files}).encode()
    monkeypatch.setattr(type(filled), "listing", lambda self: answer)
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "has of owner/name is damaged (" in outcome.err
    assert words in outcome.err
    assert outcome.err.endswith("correct HF_ENDPOINT, or tell the model's owner\n")
    assert (filled.asked, filled.cache.exists()) == ([], False)


def test_a_file_that_an_absolute_name_points_to_stays(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    victim = tmp_path / "victim.json"
    victim.write_text("mine", encoding="utf-8")
    answer = json.dumps({"sha": filled.commit, "siblings": [entry(str(victim))]}).encode()
    monkeypatch.setattr(type(filled), "listing", lambda self: answer)
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert PATH in outcome.err
    assert victim.read_text(encoding="utf-8") == "mine"


def test_a_file_that_is_listed_and_not_there_is_no_reason_to_run_again(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = json.loads(filled.listing())
    listing["sha"] = "d" * 40  # of which the hub has no file
    monkeypatch.setattr(type(filled), "listing", lambda self: json.dumps(listing).encode())
    for code in ("", "EntryNotFound"):
        filled.absent = code
        outcome = run("pull", "owner/name", "--quiet")
        assert (outcome.code, outcome.err.count("\n")) == (1, 1)
        assert "lists a file of owner/name that it does not have (http://" in outcome.err
        assert "config.json): name another revision, or tell the model's owner" in outcome.err


@pytest.mark.parametrize("address", ["notaurl", "ftp://hub", "http:"])
def test_what_is_no_address_is_corrected_and_not_run_again(
    run: Call, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    outcome = run("pull", "owner/name")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith(f"error: {address!r} is no address of a hub (")
    assert outcome.err.endswith("correct HF_ENDPOINT, such as https://huggingface.co\n")


def test_a_cache_folder_that_is_a_file_is_not_run_again(run: Call, filled: Any) -> None:
    filled.cache.touch()
    outcome = run("pull", "owner/name", "--quiet")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.endswith("set HF_HOME to a folder, or move that file away\n")


def test_a_model_without_its_config_is_not_said_to_run(run: Call, filled: Any) -> None:
    outcome = run("pull", "owner/name", "--include", "*.safetensors")
    assert outcome.code == 0
    assert "note: it does not run without config.json" in outcome.err
    assert "runs it" not in outcome.err
    assert "`clover-local chat owner/name` runs it" in run("pull", "owner/name").err


def test_a_bug_of_this_package_is_not_taken_for_an_answer_of_no_hub(
    run: Call, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(repository: str, revision: str | None) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr("clover_local.fetch.remote._answer", broken)
    assert "a fault of clover-local" in run("pull", "owner/name").err
