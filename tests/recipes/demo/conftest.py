"""The recipes that made the demo model, as modules."""

from types import ModuleType

import pytest

from tests.recipes.conftest import load_recipe


@pytest.fixture(scope="session")
def demo_network() -> ModuleType:
    return load_recipe("demo/demo_network")


@pytest.fixture(scope="session")
def demo_init(demo_network: ModuleType) -> ModuleType:
    return load_recipe("demo/demo_init")


@pytest.fixture(scope="session")
def demo_batches(demo_network: ModuleType) -> ModuleType:
    return load_recipe("demo/demo_batches")


@pytest.fixture(scope="session")
def train_demo(demo_init: ModuleType, demo_batches: ModuleType) -> ModuleType:
    return load_recipe("demo/train_demo")


@pytest.fixture(scope="session")
def demo_calibration_texts() -> ModuleType:
    return load_recipe("demo/demo_calibration_texts")
