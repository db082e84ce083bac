"""The golden vectors of the quantised formats: the part in the project, and the folder's file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden_folder import golden_folder


@cache
def kept_vectors() -> dict[str, Any]:
    path = Path(__file__).parent / "golden" / "quant.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def kept_codes(kind: str, name: str) -> torch.Tensor:
    """uint8 [rows, bytes] of one kind of row ("main", "index", "window")."""
    rows = [list(bytes.fromhex(row)) for row in kept_vectors()[kind][name]]
    return torch.tensor(rows, dtype=torch.uint8)


def kept_inputs(kind: str) -> torch.Tensor:
    """float32 [rows, 32], exact in BF16."""
    codes = kept_codes(kind, "x_bf16").contiguous()
    return codes.view(torch.bfloat16).float()


def kept_float32(name: str) -> torch.Tensor:
    """float32 [rows, 32]: inputs "x", or what they read back as in one kind of row."""
    return kept_codes("float32", name).contiguous().view(torch.float32)


def folder_array(name: str) -> torch.Tensor:
    """An array of the folder's quant.npz; without the folder the test is skipped."""
    return torch.from_numpy(_folder_file()[name])


@cache
def _folder_file() -> dict[str, np.ndarray]:
    with np.load(golden_folder() / "units" / "quant.npz") as file:
        return {name: file[name] for name in file.files}


def equal_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal shape, type and bytes: -0.0 is not 0.0, and a NaN equals itself."""
    return (
        given.shape == expected.shape
        and given.dtype == expected.dtype
        and torch.equal(
            given.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )
    )
