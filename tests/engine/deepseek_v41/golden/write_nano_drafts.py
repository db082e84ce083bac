"""Write nano_drafts.npz: drafts of v41-nano with random weights, after prompts of a few lengths.

Run where the golden folder is and `test_golden.py` passes, drafts included:

    python -m tests.engine.deepseek_v41.golden.write_nano_drafts
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.models.deepseek_v41.draft import Draft, Drafter
from tests.engine.deepseek_v41.model_bench import ModelBench, nano_bench

FILE = Path(__file__).with_name("nano_drafts.npz")
SEED = 51
"""A prompt in which nothing lies so near to a border that weights moved by 1e-7 would show."""
LENGTHS = (1, 31, 32, 33, 60)
"""Of the prompt: less than a window, about one, and more than a ring."""


def prompt_ids(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, 380, (length,), generator=generator).tolist()


def draft_after(bench: ModelBench, length: int) -> Draft:
    """The draft after the prompt and the token that the model itself would choose."""
    state = bench.begin(length)
    logits = bench.run(state, prompt_ids(length))
    draft = Drafter(bench.model).draft(state, int(logits[-1].argmax()))
    bench.end(state)
    return draft


def main() -> None:
    bench = nano_bench()
    drafts = [draft_after(bench, length) for length in LENGTHS]
    np.savez_compressed(
        FILE,
        token_ids=torch.stack([draft.token_ids for draft in drafts]).numpy(),
        logits=torch.stack([draft.logits for draft in drafts]).numpy(),
        confidence=torch.stack([draft.confidence for draft in drafts]).numpy(),
    )


if __name__ == "__main__":
    main()
