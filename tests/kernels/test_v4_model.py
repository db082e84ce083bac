"""A DeepSeek-V4 model put together from our operations gives the logits of two other programs.

The golden data (`v4/`) was made by transformers and agrees with DeepSeek's own V4 code to 5e-6.
What V4.1 does otherwise is listed in test_v4_numbers.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.golden_folder import golden_folder
from tests.kernels.v4_model import V4Model

SEQUENCES = ("n1", "n3", "n8", "n9", "n16", "n33", "n70")
TOLERANCE = 2e-5
STABLE_NOISE = 5e-5
"""A row whose logits move more under changes of 1e-7 stands beside a border between two choices."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder() / "v4"


@pytest.fixture(scope="module")
def model(folder: Path) -> V4Model:
    sizes = json.loads((folder / "config.json").read_text())
    return V4Model(sizes, load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def golden(folder: Path) -> Mapping[str, np.ndarray]:
    with np.load(folder / "golden.npz") as file:
        return dict(file)


def largest(actual: torch.Tensor, expected: np.ndarray) -> float:
    return float((actual - torch.from_numpy(expected)).abs().max())


@pytest.mark.parametrize("name", SEQUENCES)
def test_v4_of_our_operations_gives_the_golden_numbers(
    model: V4Model, golden: Mapping[str, np.ndarray], name: str
) -> None:
    seen = model.run(torch.from_numpy(golden[f"ids_{name}"]).long())
    stable = golden[f"noise_{name}"] < STABLE_NOISE
    assert stable.mean() > 0.9
    assert largest(seen.logits[stable], golden[f"logits_{name}"][stable]) <= TOLERANCE
    positions = golden[f"pos_{name}"]
    kept = stable[positions]
    for layer, streams in enumerate(seen.streams):
        for actual, expected in (
            (streams, "streams"),
            (seen.attention_in[layer], "attn_in_collapsed"),
            (seen.attention_out[layer], "attn_out"),
        ):
            wanted = golden[f"{expected}_{name}"][layer]
            assert largest(actual[positions][kept], wanted[kept]) <= TOLERANCE, (layer, expected)
        assert np.array_equal(
            seen.experts[layer][stable].numpy(), golden[f"experts_{name}"][layer][stable]
        )


@pytest.mark.parametrize("name", ["n33", "n70"])
def test_v4_of_our_operations_pools_and_chooses_the_golden_entries(
    model: V4Model, golden: Mapping[str, np.ndarray], name: str
) -> None:
    seen = model.run(torch.from_numpy(golden[f"ids_{name}"]).long())
    stable = golden[f"noise_{name}"] < STABLE_NOISE
    for layer, entries in seen.entries.items():
        assert largest(entries, golden[f"compressed_{name}_L{layer}"]) <= TOLERANCE
    chosen = {layer for layer in seen.topk if f"topk_{name}_L{layer}" in golden}
    assert len(chosen) == 2
    for layer in chosen:
        expected = golden[f"topk_{name}_L{layer}"]
        assert np.array_equal(seen.topk[layer][stable].numpy(), expected[stable])
