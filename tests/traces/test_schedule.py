"""`auto` again, by the schedule in its trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.decoding.auto.auto import MODES, Auto
from clover_local.decoding.events import EventStream, Finished, PassDone
from clover_local.decoding.result import Clock
from clover_local.decoding.run import Run
from clover_local.decoding.settings import resolve
from clover_local.decoding.trace import Trace
from clover_local.session import Session, load, open_model
from clover_local.traces.read import read_runs
from clover_local.traces.replay import replay


class AnyMode:
    """`auto` with the wildest choices: another mode at every step, blocks left at any pass."""

    starts_from_logits = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def block(self, run: Run) -> EventStream:
        run.keeps_logits = True
        mode = self._random.choice(["denoise", "draft", "ar", "ar"])
        if mode == "denoise":
            run.commit_pending(logits=True)
        run.mode = mode
        run.trace_choice(mode=mode, is_probe=False, why="by lot")
        with closing(MODES[mode].block(run)) as events:
            for event in events:
                yield event
                if isinstance(event, PassDone) and mode == "denoise":
                    mask = run.settings.mask_token_id
                    if mask in event.tokens and self._random.random() < 0.4:
                        return


@pytest.fixture(scope="module")
def session(golden_folder: Path) -> Session:
    opened = open_model(str(golden_folder))
    given = {"mode": "auto", "max_new_tokens": 120}
    settings = resolve(opened.config, opened.generation, given).settings
    return load(opened, settings, device="cpu")


def record(session: Session, path: Path, mode: AnyMode | Auto) -> tuple[int, ...]:
    """Writes the trace of a run; returns its tokens."""
    generator = session.generator
    generator.state.reset()
    generator.modes["auto"] = mode
    generator.should_stop = None
    with Trace(path, model_hash="x") as trace:
        generator.trace = trace
        *_, last = generator.run([5, 6, 7])
    assert isinstance(last, Finished)
    return last.result.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_is_run_again(
    seed: int, temperature: float, session: Session, tmp_path: Path
) -> None:
    settings = replace(
        session.generator.settings, temperature=temperature, stop_ids=(), think_end_token_id=None
    )
    session.generator.settings = settings
    path = tmp_path / "run.jsonl"
    tokens = record(session, path, AnyMode(seed))
    runs = read_runs(path)
    assert len({step.mode for step in runs[0].steps}) == 3
    session.generator.state.reset()
    outcome = replay(runs, session.generator, [settings])
    assert outcome.difference is None
    assert outcome.passes == len(runs[0].steps)
    assert session.generator.result is not None
    assert session.generator.result.token_ids == tokens


def costs(preview: float) -> Callable[[Clock], tuple[float, float]]:
    return lambda clock: (preview * clock.previews, float(clock.commits + 2 * clock.verifies))


def test_a_replay_does_not_ask_the_clock(session: Session, tmp_path: Path) -> None:
    """The trace is of a machine where previews cost nothing; here they cost a lot."""
    settings = replace(session.generator.settings, temperature=0.0)
    session.generator.settings = settings
    path = tmp_path / "run.jsonl"
    record(session, path, Auto(costs=costs(0.01)))
    runs = read_runs(path)
    session.generator.state.reset()
    session.generator.modes["auto"] = Auto(costs=costs(1000.0))
    assert replay(runs, session.generator, [settings]).difference is None


def test_a_pass_that_differs_is_found_in_auto_too(session: Session, tmp_path: Path) -> None:
    settings = replace(session.generator.settings, temperature=0.0)
    session.generator.settings = settings
    path = tmp_path / "run.jsonl"
    record(session, path, AnyMode(1))
    runs = read_runs(path)
    step = runs[0].steps[3]
    runs[0].steps[3] = replace(step, picked=(replace(step.picked[0], token=1), *step.picked[1:]))
    session.generator.state.reset()
    found = replay(runs, session.generator, [settings]).difference
    assert found is not None
    assert found.index == 3
