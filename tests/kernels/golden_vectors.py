"""The golden vectors of operations by name: the part in the project, or all of the folder."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from tests.golden_folder import golden_folder
from tests.kernels import golden_attention, golden_rows

CUTS = golden_attention.CUTS | golden_rows.CUTS
SOURCES = ("kept", "folder")
"""Where vectors come from."""


@cache
def golden_vectors(name: str, source: str) -> dict[str, torch.Tensor]:
    """The arrays of one of `CUTS`; without the folder a test that asks for it is skipped."""
    if source == "folder":
        arrays = CUTS[name](golden_folder())
    else:
        with np.load(Path(__file__).parent / "golden" / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
    # A copy, because torch wants memory that may be written.
    return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
