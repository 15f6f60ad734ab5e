"""The recipes are scripts, no installed modules: tests import them as they import each other."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


def load_recipe(name: str) -> ModuleType:
    """recipes/NAME.py as the module NAME; loaded once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def demo_network() -> ModuleType:
    return load_recipe("demo_network")


@pytest.fixture(scope="session")
def demo_init(demo_network: ModuleType) -> ModuleType:
    return load_recipe("demo_init")


@pytest.fixture(scope="session")
def demo_batches(demo_network: ModuleType) -> ModuleType:
    return load_recipe("demo_batches")


@pytest.fixture(scope="session")
def train_demo(demo_init: ModuleType, demo_batches: ModuleType) -> ModuleType:
    return load_recipe("train_demo")


@pytest.fixture(scope="session")
def demo_calibration_texts() -> ModuleType:
    return load_recipe("demo_calibration_texts")


@pytest.fixture(scope="session")
def quantization_cost() -> ModuleType:
    return load_recipe("quantization_cost")


@pytest.fixture(scope="session")
def evaluate_quantization() -> ModuleType:
    return load_recipe("evaluate_quantization")


@pytest.fixture(scope="session")
def repl_picture() -> ModuleType:
    return load_recipe("repl_picture")
