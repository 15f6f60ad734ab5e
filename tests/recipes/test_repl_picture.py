"""The picture of the REPL: what the terminal showed, in frames that an <img> can play."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pyte
import pytest

SVG = "{http://www.w3.org/2000/svg}"


Frames = Callable[..., list[Any]]


@pytest.fixture
def frames(repl_picture: ModuleType) -> Frames:
    """Makes what a terminal shows after each of some texts, one every `step` seconds."""

    def frames(*texts: str, step: float = 0.5, slow: bool = False) -> list[Any]:
        screen = repl_picture.Terminal(repl_picture.COLUMNS, repl_picture.ROWS)
        stream = pyte.Stream(screen)
        made = []
        for number, text in enumerate(texts):
            stream.feed(text)
            lines = repl_picture.snapshot(screen)
            made.append(repl_picture.Frame(number * step, lines, slow))
        return made

    return frames


def test_text_keeps_its_place_and_its_colours(frames: Frames) -> None:
    (frame,) = frames("a \x1b[2mdim\x1b[0m\r\n\x1b[32m<b>\x1b[0m \x1b[7mback\x1b[0m \x1b[>4;1m")
    first, second = frame.lines[:2]
    assert [(column, text.strip(), style[0]) for column, text, style in first] == [
        (0, "a", "default"),
        (2, "dim", "brightblack"),
    ]
    assert [(text.strip(), style[:2]) for _, text, style in second] == [
        ("<b>", ("green", "background")),
        ("back", ("background", "default")),
    ]


def test_an_answer_is_slower_and_what_does_not_change_is_one_frame(
    repl_picture: ModuleType, frames: Frames
) -> None:
    shown = list(repl_picture.timed(frames("a", "", "b", "c", step=0.2, slow=True), slower=3))
    assert [frame.at for frame in shown] == pytest.approx([0, 1.2, 1.8])
    shown = list(repl_picture.timed(frames("a", "b", "c", step=0.01), slower=3))
    assert len(shown) == 1  # the eye could not follow; the last one counts
    assert shown[0].lines == frames("abc")[0].lines


def test_the_picture_is_xml_without_script_or_font(
    repl_picture: ModuleType, frames: Frames
) -> None:
    shown = list(repl_picture.timed(frames("a <", " & b", "\r\n░░░"), slower=1))
    text = repl_picture.drawn(shown)
    root = ElementTree.fromstring(text)
    assert "a < & b" in {each.text for each in root.iter(f"{SVG}text")}
    film = next(each for each in root.iter(f"{SVG}g") if each.get("id") == "film")
    assert len(film) == 3
    names = {each.get("id") for each in root.iter(f"{SVG}g")}
    assert {use.get("href", "")[1:] for use in root.iter(f"{SVG}use")} <= names
    assert "<script" not in text and "@font-face" not in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_the_picture_of_the_readme_is_small_and_shows_masks() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "repl.svg").read_text(encoding="utf-8")
    assert len(text.encode()) < 100_000
    assert "░" in text and "tok/s" in text
    assert "docs/repl.svg" in (root / "README.md").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
