"""The real model's sizes, without a weight of it."""

import pytest

from clover_local.config import ModelConfig
from clover_local.memory.model_bytes import Formats, ModelBytes, StorageFormat, from_config

INT8 = (StorageFormat(8, 64), StorageFormat(8, 32))


@pytest.fixture(scope="session")
def balanced() -> Formats:
    """INT4 experts in groups of 128, trunk and head INT8."""
    experts = StorageFormat(4, 128)
    return Formats(experts, experts, INT8, INT8)


@pytest.fixture(scope="session")
def real_model(real_config: ModelConfig, balanced: Formats) -> ModelBytes:
    return from_config(real_config, balanced)


@pytest.fixture(scope="session")
def plain() -> Formats:
    """Nothing packed."""
    return Formats(StorageFormat(16), StorageFormat(16))
