"""Small runs of the pipeline on the golden checkpoint."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from clover_local.quant.pipeline.run import Listener, Outcome, quantize
from clover_local.quant.pipeline.source import PlainSource, open_source
from clover_local.quant.profiles import Choices, Recipe, resolve

MEMORY = 1 << 30
QUIET = Listener()
DOCUMENT = """=== sum {n}
>>> user
{n} + 7 =
>>> assistant
{n} + 7 = {sum}, and so on until nobody counts any more, which is soon after {sum}.
"""
TEXT = "".join(DOCUMENT.format(n=n, sum=n + 7) for n in range(2, 40, 3))

RunUntilKilled = Callable[[str, Recipe, int], bool]
MakeRecipe = Callable[..., Recipe]
QuantizeGolden = Callable[..., Outcome]


@pytest.fixture(scope="session")
def golden_source(golden_folder: Path) -> PlainSource:
    source = open_source(str(golden_folder))
    assert isinstance(source, PlainSource)
    return source


@pytest.fixture(scope="session")
def make_recipe(golden_source: PlainSource) -> MakeRecipe:
    """Makes a recipe for the golden model from few tokens and without an evaluation."""

    def make(
        *,
        profile: str = "balanced",
        method: str = "gptq",
        tokens: int = 300,
        evaluation_tokens: int = 0,
        **others: float,
    ) -> Recipe:
        choices = Choices(
            profile=profile,
            method=method,
            calibration_tokens=tokens,
            evaluation_tokens=evaluation_tokens,
            preview_weight=others.get("preview_weight", 1.0),
            min_tokens=int(others.get("min_tokens", 64)),
            trunk_bits=int(others.get("trunk_bits", 8)),
        )
        return resolve(choices, golden_source.config, device="cpu")[0]

    return make


@pytest.fixture
def quantize_golden(
    golden_source: PlainSource, make_recipe: MakeRecipe, tmp_path: Path, text_file: Path
) -> QuantizeGolden:
    """Quantizes the golden model into `tmp_path / name`, calibrated on `text_file`."""

    def run(
        name: str = "result",
        *,
        recipe: Recipe | None = None,
        source: PlainSource = golden_source,
        calibration: Path = text_file,
        memory: int = MEMORY,
        listener: Listener = QUIET,
    ) -> Outcome:
        return quantize(
            source,
            tmp_path / name,
            recipe=recipe or make_recipe(),
            calibration=calibration,
            memory=memory,
            listener=listener,
        )

    return run


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


class KilledRuns:
    """The program beside this file: it runs `quantize` and kills it at a step."""

    def __init__(self, program: subprocess.Popen[str], source: Path, calibration: Path) -> None:
        self.program = program
        self.source = source
        self.calibration = calibration

    def run(self, destination: Path, recipe: Recipe, *, step: int | None) -> bool:
        """Whether the run finished before its step came."""
        request = {
            "source": str(self.source),
            "destination": str(destination),
            "calibration": str(self.calibration),
            "recipe": asdict(recipe),
            "step": step,
        }
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        print(json.dumps(request), file=self.program.stdin, flush=True)
        answer = self.program.stdout.readline().strip()
        assert answer in ("killed", "finished")
        return answer == "finished"


@pytest.fixture(scope="module")
def killed_runs(
    golden_source: PlainSource, make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KilledRuns]:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        runs = KilledRuns(program, golden_source.folder, folder / "text.txt")
        recipe = make_recipe(tokens=100, evaluation_tokens=100)
        assert runs.run(folder / "first", recipe, step=None)
        yield runs
        assert program.stdin is not None
        program.stdin.close()


@pytest.fixture
def run_until_killed(killed_runs: KilledRuns, tmp_path: Path) -> RunUntilKilled:
    """As `quantize_golden`, killed before a step; whether it had finished before that."""
    return lambda name, recipe, step: killed_runs.run(tmp_path / name, recipe, step=step)
