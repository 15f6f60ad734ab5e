"""The page of a trace as a person sees it: opened in a real browser, clicked and typed at."""

import ast
import re
from collections.abc import Iterator, Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest

import clover_local.decoding
from clover_local.decoding.keys import SAMPLERS
from clover_local.traces.page import page, write_page
from clover_local.traces.payload import visible
from clover_local.traces.read import Choice, Header, PickedRow, RecordedRun, Step

MASK = 99
HOSTILE = {
    1: "</script><script>document.title='owned'</script>",
    2: "<img src=x onerror=\"document.title='owned'\">",
    3: "שלום",
    4: "👩‍🚀",
    5: "\x1b[31m\x00",
    6: "\u202eevil",
    7: "\n",
    8: " two",
    9: "<!--",
    MASK: "<|mask|>",
}


def decode(ids: Sequence[int]) -> str:
    return "".join(HOSTILE.get(token, f" w{token}") for token in ids)


def row(number: int, token: int, confidence: float, reason: str = "above_threshold") -> PickedRow:
    return PickedRow(number, token, confidence, reason, ((token, confidence), (8, 0.004)))


def step(picked: Sequence[PickedRow], before: Sequence[int] = (), **values: Any) -> Step:
    given = {"kind": "pass", "mode": "denoise", "block": 0, "start": 5, "number": 0}
    return Step(
        **{**given, "milliseconds": 1.5, **values}, before=tuple(before), picked=tuple(picked)
    )


def recorded(steps: Sequence[Step], *, tokens: Sequence[int] = ()) -> RecordedRun:
    settings = {"mode": "auto", "mask_token_id": MASK, "threshold": 0.5, "seed": 7}
    header = Header("demo", "hash", (1, 2, 3, 4, 5), 512, "cpu", "float32", settings, {})
    return RecordedRun(header, [*steps], finish_reason="stop", token_ids=tuple(tokens))


@pytest.fixture
def every_mode() -> RecordedRun:
    """Two passes of a block, a draft round with two accepted drafts, and two tokens of ar."""
    steps = [
        step([row(0, 1, 0.999), row(3, 3, 0.96)], [MASK] * 4, coreset_sizes=(7, 9)),
        step(
            [row(1, 2, 0.9), row(2, 4, 0.3, "most_confident")], [1, MASK, MASK, 3], number=1,
            controls={"presence_penalty": 0.25},
        ),
        step([row(0, 20, 0.7, "draft"), row(1, 21, 0.7, "draft"), row(2, 22, 0.7, "draft")],
             [MASK] * 3, mode="draft", block=1, start=9),
        step([row(0, 20, 0.9, "accepted"), row(1, 21, 0.9, "accepted"), row(2, 5, 0.8, "boundary")],
             [3, 20, 21, 22], kind="verify", mode="draft", block=1, start=8, accepted=2),
        step([row(0, 6, 0.99, "next_token")], mode="ar", block=4, start=12),
        step([row(0, 7, 0.99, "next_token")], mode="ar", block=5, start=13),
    ]  # fmt: skip
    run = recorded(steps, tokens=[1, 2, 4, 3, 20, 21, 5, 6, 7])
    run.choices.append(Choice(2, "draft", True, "not measured <yet>"))
    return run


def opened(browser: Any, run: RecordedRun, path: Path) -> None:
    """Writes the page and opens it in a wide window; it must not ask for anything or complain."""
    write_page(path, page([run], decode))
    browser.resize(1300)
    browser.open(path)
    assert browser.requests == [path.as_uri()]
    assert browser.complaints == []


def texts(browser: Any, selector: str) -> Any:
    return browser.value(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def test_a_person_steps_through_the_forwards(
    browser: Any, every_mode: RecordedRun, tmp_path: Path
) -> None:
    opened(browser, every_mode, tmp_path / "page.html")
    where = "document.querySelector('output').textContent"
    assert browser.value(where) == "1 of 6 · denoise · block 0, pass 1"
    assert texts(browser, ".text .active .cell")[1:3] == ["░", "░"]
    browser.press("ArrowRight")
    assert browser.value(where) == "2 of 6 · denoise · block 0, pass 2"
    assert "░" not in texts(browser, ".text .active .cell")
    assert "most confident row" in texts(browser, "aside")[0]  # the least sure row is shown first
    browser.press("ArrowUp")
    assert "Row 1" in texts(browser, "aside")[0]
    browser.press("PageDown")
    assert browser.value(where) == "3 of 6 · draft · round 1, pass 1"
    assert texts(browser, ".now .choice") == ["auto tries draft: not measured <yet>"]
    browser.press("ArrowRight")
    assert texts(browser, ".now .current .rejected") == [" w22"]
    assert texts(browser, ".now .current .accepted") == [" w20", " w21"]
    browser.press("End")
    assert browser.value(where) == "6 of 6 · ar · token 8"
    browser.click("button[aria-label^='forward before']")
    assert browser.value(where) == "5 of 6 · ar · token 7"
    browser.click(".overview span")
    assert browser.value("document.querySelector('input').value") == "0"
    browser.value(
        "(() => { const s = document.querySelector('input'); s.value = 3;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert browser.value(where) == "4 of 6 · draft · round 1, verify"
    browser.click(".block [data-row='3']")
    assert browser.value(where) == "1 of 6 · denoise · block 0, pass 1"
    assert "Row 3: שלום 96.0 %, above the threshold." in texts(browser, "aside")[0]
    assert browser.complaints == []


def test_blocks_say_what_happened_in_them(
    browser: Any, every_mode: RecordedRun, tmp_path: Path
) -> None:
    opened(browser, every_mode, tmp_path / "page.html")
    assert texts(browser, ".block summary") == [
        "denoise · block 0 · 4 rows in 2 passes · from token 0 · 3 ms",
        "draft · round 1 · 2 of 3 drafts accepted, and one token more · from token 4 · 3 ms",
        "ar · 2 tokens, one a forward · from token 7",
    ]
    notes = texts(browser, ".block th small")
    assert notes[:2] == [
        "1.5 ms · +2 · 7 to 9 experts a layer",
        "1.5 ms · +2 · presence penalty 0.25",
    ]
    assert "threshold 0.5 instead of 0.95" in texts(browser, ".changed li")
    titles = browser.value("document.querySelector('.block .picked').title").split("\n")
    assert titles[0].endswith("99.9 %") and titles[1] == "above the threshold"
    assert titles[3] == "0.40 %   two"
    colours = browser.value(
        "[...document.querySelectorAll('.block .picked')]"
        ".map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(colours[:4])) == 4  # 0.999, 0.96, 0.9 and 0.3


def test_texts_are_texts_whatever_they_hold(
    browser: Any, every_mode: RecordedRun, tmp_path: Path
) -> None:
    opened(browser, every_mode, tmp_path / "page.html")
    browser.click(".blocks button")
    assert browser.value("document.title") == "clover-local report"
    assert browser.value("document.querySelectorAll('main script, main img').length") == 0
    answer = browser.value("document.querySelector('.answer').textContent")
    assert answer == "".join(visible(HOSTILE.get(t, f" w{t}")) for t in every_mode.token_ids)
    assert "␛[31m␀" in answer and "⟨202E⟩evil" in answer and "👩‍🚀" in answer
    assert "⏎" in texts(browser, ".flow .cell")


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_it_is_readable_in_every_window_and_light(
    browser: Any, every_mode: RecordedRun, tmp_path: Path, width: int
) -> None:
    opened(browser, every_mode, tmp_path / "page.html")
    inks = []
    for scheme in ("light", "dark"):
        browser.resize(width, scheme=scheme)
        assert browser.value("document.documentElement.scrollWidth") <= width
        inks.append(browser.value(f"({CONTRAST})()"))
    assert browser.value("document.querySelector('.lead').offsetHeight") > 15  # letters are there
    assert min(inks) >= 4.5  # of WCAG's grade AA
    assert browser.picture().startswith(b"\x89PNG")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != "rgb(253, 253, 252)"


CONTRAST = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
      .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(e.parentElement) : colour;
  };
  return Math.min(...[...document.querySelectorAll("main *")]
    .filter((e) => e.getClientRects().length && !e.closest(".mask")
      && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => {
      const pair = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => a - b);
      return (pair[1] + 0.05) / (pair[0] + 0.05);
    }));
}"""


def test_a_long_trace_builds_only_what_is_looked_at(browser: Any, tmp_path: Path) -> None:
    blocks = [
        step(
            [row(number, 20 + number, 0.97) for number in range(first, 32, 8)],
            [20 + n if n % 8 < first else MASK for n in range(32)],
            block=block, start=5 + 32 * block, number=first,
        )
        for block in range(150)
        for first in range(8)
    ]  # fmt: skip
    opened(browser, recorded(blocks, tokens=[20] * 4800), tmp_path / "page.html")
    cells = "document.querySelectorAll('.block .cell').length"
    assert browser.value("document.querySelectorAll('.block').length") == 150
    assert browser.value(cells) == 8 * 32
    browser.press("End")
    assert "1200 of 1200" in texts(browser, "output")[0]
    browser.value("dispatchEvent(new Event('beforeprint'))")
    assert browser.value(cells) == 150 * 8 * 32
    assert browser.complaints == []


def test_more_forwards_than_a_call_takes_arguments(browser: Any, tmp_path: Path) -> None:
    def tokens(count: int, *, mode: str, start: int) -> list[Step]:
        picked = [row(0, 20, 0.9, "next_token")]
        return [step(picked, mode=mode, start=start + n) for n in range(count)]

    # Four groups, of which the first alone is open from the start.
    stretches = [(3, "ar"), (70_000, "denoise"), (70_000, "draft"), (3, "ar")]
    steps: list[Step] = []
    for count, mode in stretches:
        steps += tokens(count, mode=mode, start=5 + len(steps))
    opened(browser, recorded(steps), tmp_path / "page.html")
    assert texts(browser, "output") == ["1 of 140006 · ar · token 0"]
    assert len(texts(browser, ".overview span")) == 4


def reasons(folder: Path) -> Iterator[str]:
    """Values of the constants in each simple statement that speaks of reasons."""
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        module = import_module(".".join((clover_local.decoding.__name__, *parts)))
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
                continue
            if re.search(r"\breasons?\b", ast.unparse(statement)):
                names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                values = (getattr(module, name, None) for name in names if name.isupper())
                yield from (value for value in values if isinstance(value, str))


def test_every_reason_that_a_trace_may_give_is_explained() -> None:
    written = {*reasons(Path(clover_local.decoding.__file__).parent)}
    assert {"next_token", "boundary", "other_token", "finish_gap", "klass"} <= written
    words = resources.files("clover_local.traces").joinpath("words.js").read_text(encoding="utf-8")
    listed = words.partition("const REASONS = {")[2].partition("};")[0]
    explained = {*re.findall(r"^  (\w+): \".+\",$", listed, flags=re.MULTILINE)}
    assert written - explained <= {*SAMPLERS}
    assert explained <= written  # and nothing that no trace can give


def test_runs_of_a_conversation_and_an_empty_one_are_shown(
    browser: Any, every_mode: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    write_page(path, page([every_mode, recorded([])], decode))
    browser.open(path)
    assert texts(browser, "h2") == ["Run 1 of 2", "Run 2 of 2"]
    assert "ended before a forward picked a token" in texts(browser, ".run:last-child")[0]
    assert browser.complaints == []
