"""`clover-local simulate`, from the arguments to the table."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.residency.profile import load_profile, profile_of, save_profile
from clover_local.residency.synthetic import Synthetic, synthetic_trace
from clover_local.residency.trace import RoutingTrace, routing_record

Run = Callable[..., Any]

SMALL = Synthetic(layers=3, experts=16, experts_per_token=2, rows=8, blocks=6, passes=(2, 3))


@pytest.fixture(scope="module")
def recorded() -> RoutingTrace:
    return synthetic_trace(SMALL)


@pytest.fixture
def trace(recorded: RoutingTrace, tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    names = {"preview": "pass", "commit": "commit", "prompt": "commit"}
    lines = [
        json.dumps({"record": names[each.kind], "of": "answer", "routing": routing_record(each)})
        for each in recorded.forwards
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_table_has_a_row_for_every_size_and_policy(run: Run, trace: str) -> None:
    done = run("simulate", trace, "--sizes", "25%,40")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("6 blocks, 3 layers of 16 experts, 1.62 MB each")
    assert "misses / Belady" in lines[1]
    assert "hits, prompts" not in lines[1]
    assert len(lines) == 2 + 2 * 5
    assert lines[2].split()[:4] == ["12", "(25", "%)", "lfru"]
    assert "no run could" in done.err


def test_json_is_one_object(run: Run, trace: str, recorded: RoutingTrace) -> None:
    done = run("simulate", trace, "--policy", "lru", "--sizes", "100%", "--json", "--quiet")
    found = json.loads(done.out)
    assert (found["layers"], found["experts"], found["record_bytes"]) == (3, 16, 1_622_000)
    (replay,) = found["replays"]
    assert replay["misses"] == replay["belady_misses"] == (profile_of(recorded).uses > 0).sum()
    assert done.err == ""


def test_a_profile_is_where_policies_start(
    run: Run, trace: str, recorded: RoutingTrace, tmp_path: Path
) -> None:
    save_profile(profile_of(recorded), tmp_path / "profile.json")
    options = ("--policy", "static", "--profile", str(tmp_path / "profile.json"))
    done = run("simulate", trace, *options)
    assert done.code == 0, done.err
    assert "no run could" not in done.err


def test_profile_of_a_trace_is_saved(
    run: Run, trace: str, recorded: RoutingTrace, tmp_path: Path
) -> None:
    path = tmp_path / "saved.json"
    done = run("simulate", trace, "--sizes", "50%", "--save-profile", str(path))
    assert done.code == 0, done.err
    assert (load_profile(path).uses == profile_of(recorded).uses).all()
    done = run("simulate", trace, "--sizes", "0", "--save-profile", str(tmp_path / "other.json"))
    assert done.code == 1 and not (tmp_path / "other.json").exists()


def test_chart_is_drawn(run: Run, trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("simulate", trace, "--policy", "lru", "--plot", str(tmp_path / "chart.png"))
    assert done.code == 0, done.err
    assert (tmp_path / "chart.png").stat().st_size > 1000
    (tmp_path / "folder.png").mkdir()
    done = run("simulate", trace, "--plot", str(tmp_path / "folder.png"))
    assert done.code == 1 and "folder.png is there and no file: pass another name" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "chart.gif"), "a chart is .png or .svg"),
        (("--policy", "lru,mru"), "--policy mru is unknown: use lfru, lfu"),
        (("--sizes", "half"), "--sizes half is no size"),
        (("--sizes", "12.5"), "--sizes 12.5 is no size"),
        (("--sizes", "0"), "--sizes 0 is 0 slots: use 1 to 48"),
        (("--sizes", "110%"), "--sizes 110% is 53 slots: use 1 to 48"),
        (("--record-bytes", "0MB"), "must be more than 0"),
        (("--link", "52GB"), "--link '52GB' is no rate"),
        (("--profile", "none.json"), "none.json cannot be read"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: tuple[str, ...], message: str, run: Run, trace: str
) -> None:
    done = run("simulate", trace, *arguments)
    assert done.code == 1
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_a_profile_of_another_model_is_refused(run: Run, trace: str, tmp_path: Path) -> None:
    other = synthetic_trace(Synthetic(layers=2, experts=16, experts_per_token=2, blocks=1))
    save_profile(profile_of(other), tmp_path / "other.json")
    done = run("simulate", trace, "--profile", str(tmp_path / "other.json"))
    assert done.code == 1
    assert "is of 2 layers of 16 experts" in done.err


def test_torch_is_not_imported(trace: str) -> None:
    code = (
        "import sys; from clover_local.cli.app import main\n"
        f"sys.argv = ['clover-local', 'simulate', {trace!r}, '--sizes', '50%', '--quiet']\n"
        "code = main()\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
