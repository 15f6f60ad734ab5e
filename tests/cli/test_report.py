"""`clover-local report`, by the data in the page; `tests/traces/test_page.py` looks at the page."""

import errno
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
VOID = {"meta"}


class Page(HTMLParser):
    """Elements in order, whether every one is closed in its place, and the data of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))


@pytest.fixture
def traced(run: Call, golden_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the trace of a run with these flags."""

    def traced(*arguments: str) -> Path:
        path = tmp_path / "run.jsonl"
        common = ("-p", '<b>&"hello"</b>', "--max-new-tokens", "40", "--trace", str(path))
        assert run("generate", str(golden_folder), *common, *arguments).code == 0
        return path

    return traced


def steps(path: Path, *kinds: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["record"] in kinds]


@pytest.mark.parametrize("mode", ["denoise", "draft", "ar", "auto"])
def test_every_forward_and_every_choice_is_there(
    run: Call, traced: Call, tmp_path: Path, mode: str
) -> None:
    trace, out = traced("--mode", mode), tmp_path / "report.html"
    outcome = run("report", str(trace), str(out))
    assert (outcome.code, outcome.out, outcome.err) == (0, f"wrote {out}\n", "")
    page = Page(out.read_text(encoding="utf-8"))
    assert page.open == []
    (shown,) = page.data["runs"]
    made = steps(trace, "pass", "verify")
    assert [(each["mode"], each["block"], each["start"]) for each in shown["steps"]] == [
        (each["mode"], each["block"], each["start"]) for each in made
    ]
    assert [each["coreset"] for each in shown["steps"]] == [
        each.get("coreset_sizes", []) for each in made
    ]
    picked = [[row["token"] for row in each["fixed"]] for each in made]
    assert [[row[1] for row in each["picked"]] for each in shown["steps"]] == picked
    choices = [(each["mode"], each["why"]) for each in steps(trace, "choice")]
    assert [(each[1], each[3]) for each in shown["choices"]] == choices
    assert bool(choices) == (mode == "auto")
    changed = {name: (value, usual) for name, value, usual in shown["changed"]}
    assert changed.pop("max_new_tokens")[0] == "40"
    assert changed == ({} if mode == "denoise" else {"mode": (mode, "denoise")})


def test_the_page_needs_nothing_else_and_runs_no_text(
    run: Call, traced: Call, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    run("report", str(traced()), str(out))
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "img", "b", "iframe"})
    assert len(page.scripts) == 2  # the data and the script
    assert not any(
        {"src", "href", "onclick"} & attributes.keys() for _, attributes in page.elements
    )
    assert "url(" not in text and "@import" not in text and "://" not in text
    assert '<b>&"hello"</b>' in page.data["runs"][0]["prompt"]
    policy = next(a["content"] for _, a in page.elements if "http-equiv" in a)
    assert policy is not None and re.fullmatch(
        r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'", policy
    )


def test_without_the_model_tokens_are_ids(run: Call, traced: Call, tmp_path: Path) -> None:
    trace, out = traced(), tmp_path / "report.html"
    lines = trace.read_text(encoding="utf-8").splitlines()
    header = {**json.loads(lines[0]), "model": ""}
    trace.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n", encoding="utf-8")
    outcome = run("report", str(trace), str(out))
    assert outcome.code == 0
    assert "--model" in outcome.err
    data = Page(out.read_text(encoding="utf-8")).data
    assert data["runs"][0]["prompt"] == " ".join(map(str, header["prompt_ids"]))
    assert all(text == token for token, text in data["tokens"].items())
    assert run("report", str(trace), str(out), "--model", "./absent").code == 1


def test_a_trace_of_a_run_that_was_killed_is_shown(run: Call, traced: Call, tmp_path: Path) -> None:
    trace, out = traced(), tmp_path / "report.html"
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (1, 3):  # the header alone; without an end
        trace.write_text("".join(lines[:kept]), encoding="utf-8")
        assert run("report", str(trace), str(out)).code == 0
        assert Page(out.read_text(encoding="utf-8")).data["runs"][0]["finish"] is None


def test_a_file_that_is_no_report_is_kept(run: Call, traced: Call, tmp_path: Path) -> None:
    trace, out = traced(), tmp_path / "report.html"
    for _ in range(2):
        assert run("report", str(trace), str(out)).code == 0
    before = trace.read_bytes()
    absent = tmp_path / "absent"
    for path, words in (
        (trace, "is no report"),
        (tmp_path, "cannot be written"),
        (absent / "report.html", "cannot be written"),
    ):
        outcome = run("report", str(trace), str(path))
        assert (outcome.code, outcome.err.count("\n")) == (1, 1)
        assert words in outcome.err
    assert trace.read_bytes() == before
    assert not absent.exists()
    assert run("report", str(absent), str(out)).code == 1


def test_a_full_disk_leaves_the_report_that_was_there(
    run: Call, traced: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = traced(), tmp_path / "report.html"
    run("report", str(trace), str(out))
    before = out.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("clover_local.files.os.fsync", full)
    outcome = run("report", str(trace), str(out))
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "No space left on device" in outcome.err
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "report.html"}
