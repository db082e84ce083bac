"""Drafts of v41-nano are those it made when drafts agreed with DeepSeek's own code.

For machines without the golden folder; `golden/write_nano_drafts.py` says how they were made.
"""

from __future__ import annotations

import numpy as np
import torch

from .golden.write_nano_drafts import FILE, LENGTHS, draft_after
from .model_bench import nano_bench


def test_drafts_are_those_that_were_written_down() -> None:
    with np.load(FILE) as data:
        golden = {name: torch.from_numpy(data[name]) for name in data.files}
    bench = nano_bench()
    for number, length in enumerate(LENGTHS):
        draft = draft_after(bench, length)
        assert torch.equal(draft.token_ids, golden["token_ids"][number]), length
        assert (draft.logits - golden["logits"][number]).abs().max() <= 1e-4, length
        assert (draft.confidence - golden["confidence"][number]).abs().max() <= 1e-4, length
