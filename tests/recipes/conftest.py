"""The recipes are scripts, no installed modules: tests import them as they import each other."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


def load_recipe(name: str) -> ModuleType:
    """recipes/NAME.py as a module of the file's own name; loaded once."""
    path = RECIPES / f"{name}.py"
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


@pytest.fixture(scope="session")
def quantization_cost() -> ModuleType:
    return load_recipe("quantization_cost")


@pytest.fixture(scope="session")
def evaluate_quantization() -> ModuleType:
    return load_recipe("evaluate_quantization")


@pytest.fixture(scope="session")
def repl_picture() -> ModuleType:
    return load_recipe("repl_picture")
