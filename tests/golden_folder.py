"""Where the golden vectors lie that other implementations made.

They are not part of the project: CACHALOT_GOLDEN_DIR names the folder, by default
`../shared/golden` beside the checkout. What CI must have is kept small in tests/*/golden/.
"""

import os
from pathlib import Path

import pytest


def golden_folder() -> Path:
    """Return the folder, or skip the test that asks for it where there is none."""
    named = os.environ.get("CACHALOT_GOLDEN_DIR")
    folder = Path(named) if named else Path(__file__).parents[1].parent / "shared" / "golden"
    if not folder.is_dir():
        pytest.skip(f"no golden vectors in {folder} (CACHALOT_GOLDEN_DIR names the folder)")
    return folder
