"""The golden model, loaded once."""

import pytest
from safetensors.torch import load_file

from engine.models.deepseek_v41.checkpoint.folder import load_weights
from tests.golden_folder import golden_folder

from .golden_model import Arrays, GoldenModel


@pytest.fixture(scope="session")
def golden() -> GoldenModel:
    folder = golden_folder() / "v41"
    config, weights = load_weights(folder)
    return GoldenModel(
        config=config,
        tensors=load_file(folder / "model.safetensors"),
        weights=weights,
        sequences=Arrays(folder / "sequences.npz"),
        internals=Arrays(folder / "internals.npz"),
        extra=Arrays(folder / "extra.npz"),
    )
