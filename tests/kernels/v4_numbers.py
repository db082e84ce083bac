"""What transformers' DeepSeek-V4 computes (`make_v4_numbers.py`), and how near we must be.

Tolerances are relative to the largest number of the expected tensor (at least 1): both sides are
float32 and sum in orders of their own.
"""

from pathlib import Path

import numpy as np
import torch

from engine.models.deepseek_v41.config import YarnScaling

with np.load(Path(__file__).parents[1] / "engine" / "golden" / "v4" / "v4_numbers.npz") as file:
    NUMBERS = {name: torch.from_numpy(array) for name, array in file.items()}

OPERATION = 2e-6
"""Largest difference after one operation."""
SUBLAYER = 1e-5
"""After several, one after the other."""
ROPE_DIM = 8
YARN = YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=64)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    difference = (actual[finite] - expected[finite]).abs().max()
    assert difference <= tolerance * max(1.0, float(expected[finite].abs().max()))
