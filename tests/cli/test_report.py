"""`clover-local report`, by parsing the page."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
VOID = {"meta"}


class Page(HTMLParser):
    """Elements in order, their text, and whether every one is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []  # of `code`, `pre` and `summary`, in order
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("code", "pre", "summary"):
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("code", "pre", "summary"):
            self.texts[-1] += data

    def count(self, tag: str, kind: str) -> int:
        return sum(name == tag and kind in (a.get("class") or "") for name, a in self.elements)


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


@pytest.mark.parametrize("mode", ["denoise", "draft"])
def test_every_block_and_every_pass_is_there(
    run: Call, traced: Call, tmp_path: Path, mode: str
) -> None:
    trace, out = traced("--mode", mode), tmp_path / "report.html"
    outcome = run("report", str(trace), str(out))
    assert (outcome.code, outcome.out, outcome.err) == (0, f"wrote {out}\n", "")
    page = Page(out.read_text(encoding="utf-8"))
    assert page.open == []
    made = steps(trace, "pass", "verify")
    blocks = {step["block"] for step in made}
    assert page.count("details", "block") == len(blocks)
    assert page.count("tr", "pass") == len(made)
    fixed = [row for step in made for row in step["fixed"]]
    assert sum("title" in attributes for _, attributes in page.elements) == len(fixed)
    passes = [step for step in made if step.get("block_before")]
    masked = sum(token == 510 for step in passes for token in step["block_before"])
    gone = sum(len(step["fixed"]) for step in passes)
    assert page.count("code", "mask") == 1 + masked - gone  # one in the legend


def test_ar_is_one_line_of_tokens(run: Call, traced: Call, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run("report", str(traced("--mode", "ar")), str(out)).code == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert page.count("tr", "pass") == 1
    assert sum("title" in attributes for _, attributes in page.elements) == 40


def test_auto_is_shown_in_the_modes_that_it_ran(run: Call, traced: Call, tmp_path: Path) -> None:
    trace, out = traced("--mode", "auto"), tmp_path / "report.html"
    assert run("report", str(trace), str(out)).code == 0
    page = Page(out.read_text(encoding="utf-8"))
    ran = {choice["mode"] for choice in steps(trace, "choice")}
    assert len(ran) > 1
    assert {text.partition(":")[0] for text in page.texts} >= ran


def test_the_page_needs_nothing_else_and_shows_text_as_text(
    run: Call, traced: Call, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    run("report", str(traced()), str(out))
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "img", "b", "iframe"})
    assert not any(
        {"src", "href", "onclick"} & attributes.keys() for _, attributes in page.elements
    )
    assert "url(" not in text and "@import" not in text
    assert any('<b>&"hello"</b>' in each for each in page.texts)  # the prompt


def test_without_the_model_tokens_are_ids(run: Call, traced: Call, tmp_path: Path) -> None:
    trace, out = traced(), tmp_path / "report.html"
    lines = trace.read_text(encoding="utf-8").splitlines()
    header = {**json.loads(lines[0]), "model": ""}
    trace.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n", encoding="utf-8")
    outcome = run("report", str(trace), str(out))
    assert outcome.code == 0
    assert "--model" in outcome.err
    prompt = " ".join(map(str, header["prompt_ids"]))
    assert prompt in Page(out.read_text(encoding="utf-8")).texts
    assert run("report", str(trace), str(out), "--model", "./absent").code == 1


def test_a_file_that_is_no_report_is_kept(run: Call, traced: Call, tmp_path: Path) -> None:
    trace, out = traced(), tmp_path / "report.html"
    for _ in range(2):
        assert run("report", str(trace), str(out)).code == 0
    before = trace.read_bytes()
    for path, words in ((trace, "is no report"), (tmp_path, "cannot be written")):
        outcome = run("report", str(trace), str(path))
        assert (outcome.code, outcome.err.count("\n")) == (1, 1)
        assert words in outcome.err
    assert trace.read_bytes() == before
    assert run("report", str(tmp_path / "absent"), str(out)).code == 1
