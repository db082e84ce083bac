"""v41-nano computes the numbers it did when the model agreed with DeepSeek's own code.

For machines without the golden folder; `golden/write_nano.py` says how they were made.
"""

from __future__ import annotations

import numpy as np
import torch

from .borders import STABLE
from .golden.write_nano import FILE, SEQUENCES, STABLE_ROWS, run
from .model_bench import nano_bench


def test_nano_computes_the_numbers_that_were_written_down() -> None:
    with np.load(FILE) as data:
        golden = {name: torch.from_numpy(data[name]) for name in data.files}
    bench = nano_bench()
    for sequence in range(SEQUENCES):
        found = run(bench, golden["ids"][sequence].tolist())
        assert found.keys() == golden.keys() - {"ids", "noise"}
        stable = golden["noise"][sequence] < STABLE
        assert stable.float().mean() >= STABLE_ROWS
        difference = (found.pop("logits") - golden["logits"][sequence])[stable].abs().max()
        assert difference <= 1e-4, difference
        for name, chosen in found.items():
            assert torch.equal(chosen[stable], golden[name][sequence].long()[stable]), name
