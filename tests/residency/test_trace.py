"""Routing in a trace: what is written is what is read, and what is damaged is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_local.errors import TraceError
from clover_local.residency.trace import (
    Forward,
    forward_of,
    read_routing,
    read_trace,
    routing_record,
)

IDS = np.array([[[0, 4], [4, -1], [8, 0]], [[2, 1], [2, 1], [2, 0]]])  # [L, T, A]


def made(**options: Any) -> Forward:
    return forward_of(
        list(IDS), num_experts=9, **{"kind": "commit", "block": 0, "number": 0, **options}
    )


def test_rows_are_counted_by_expert() -> None:
    forward = made(kind="preview", masked=[True, False, True])
    assert forward.rows.tolist() == [[2, 0, 0, 0, 2, 0, 0, 0, 1], [1, 2, 3, 0, 0, 0, 0, 0, 0]]
    assert forward.masked is not None
    assert forward.masked.tolist()[0] == [2, 0, 0, 0, 1, 0, 0, 0, 1]
    first, _ = forward.demands()
    assert (first.layer, first.experts.tolist(), first.rows.tolist()) == (0, [0, 4, 8], [2, 2, 1])


@pytest.mark.parametrize("masked", [None, [True, False, True]], ids=["commit", "preview"])
def test_a_record_reads_back_as_it_was(masked: list[bool] | None) -> None:
    forward = made(kind="preview" if masked else "commit", masked=masked, block=3, number=2)
    record = json.loads(json.dumps(routing_record(forward)))
    back = read_routing(record, kind=forward.kind, block=3, number=2)
    assert np.array_equal(back.rows, forward.rows)
    if back.masked is None or forward.masked is None:
        assert (back.masked, forward.masked, masked) == (None, None, None)
    else:
        assert np.array_equal(back.masked, forward.masked)
    assert (back.kind, back.block, back.number) == (forward.kind, 3, 2)


def test_a_record_of_the_large_model_takes_few_bytes() -> None:
    random = np.random.default_rng(0)
    ids = [random.choice(70, (32, 8)) for _ in range(40)]
    forward = forward_of(ids, num_experts=256, kind="commit", block=0, number=0)
    assert len(json.dumps(routing_record(forward))) < 6000


def test_wrong_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="expert ids 0 to 9, there are 9 experts"):
        forward_of([np.array([[0, 9]])], num_experts=9, kind="commit", block=0, number=0)
    with pytest.raises(ValueError, match="70000 rows"):
        forward_of([np.zeros((70_000, 1))], num_experts=9, kind="prompt", block=0, number=0)


def written(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run_records() -> list[dict[str, object]]:
    routing = routing_record(made())
    return [
        {"record": "header"},
        {"record": "commit", "of": "prompt", "routing": routing},
        {"record": "pass", "pass": 0, "routing": routing},
        {"record": "pass", "pass": 1, "routing": routing},
        {"record": "commit", "of": "answer", "routing": routing},
        {"record": "pass", "mode": "ar", "pass": 0},  # it picked from logits of the commit before
        {"record": "commit", "of": "answer", "routing": routing},
        {"record": "end"},
    ]


def test_blocks_end_with_their_commit_and_with_their_run(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace", *run_records(), *run_records()))
    found = [(forward.kind, forward.block, forward.number) for forward in trace.forwards]
    assert found == [
        ("prompt", 1, 0),
        ("preview", 1, 0),
        ("preview", 1, 1),
        ("commit", 1, 2),
        ("commit", 2, 0),
        ("prompt", 4, 0),
        ("preview", 4, 0),
        ("preview", 4, 1),
        ("commit", 4, 2),
        ("commit", 5, 0),
    ]
    assert (trace.layers, trace.experts) == (2, 9)


def damaged(**changes: object) -> dict[str, object]:
    return {"record": "commit", "routing": {**routing_record(made()), **changes}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"record": "pass"}, "has no routing: record it anew"),
        ({"other": 1}, "line 1 is no record of a trace"),
        (damaged(used="####"), "line 1 has damaged routing"),
        (damaged(used="AAAA"), "0 expected"),
        (damaged(rows="AAAA"), "line 1 has damaged routing"),
        (damaged(layers=3), "bytes for 27 bits"),
        (damaged(layers=float("inf")), "line 1 has damaged routing"),
        (damaged(layers=10**9), "1000000000 layers of 9 experts"),
        ({"record": "commit", "routing": {"layers": 2}}, "line 1 has damaged routing"),
        ({"record": "commit", "routing": 7}, "line 1 has damaged routing"),
    ],
)
def test_damaged_traces_are_refused(
    record: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path / "trace", record))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="it is no text"):
        read_trace(tmp_path / "bytes")
    for text in ("Hello\n", "[" * 100_000):
        (tmp_path / "text").write_text(text, encoding="utf-8")
        with pytest.raises(TraceError, match="is no record of a trace"):
            read_trace(tmp_path / "text")


def test_models_of_two_shapes_are_not_mixed(tmp_path: Path) -> None:
    other = forward_of([np.array([[0]])], num_experts=9, kind="commit", block=0, number=0)
    records: list[dict[str, object]] = [
        {"record": "commit", "routing": routing_record(each)} for each in (made(), other)
    ]
    with pytest.raises(TraceError, match="mixes models of 2 shapes"):
        read_trace(written(tmp_path / "trace", *records))
