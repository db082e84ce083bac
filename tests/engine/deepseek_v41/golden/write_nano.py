"""Write nano.npz: what v41-nano with seeded random weights computes.

For where no golden folder is. Run it on a commit whose `test_golden.py` passes with one: then these
numbers stand for DeepSeek's own code too. Sequences are those in which few rows lie so near to a
rounding or selection border that another order of summing would move them; `noise` says which
(`borders`). From the root:

    python -m tests.engine.deepseek_v41.golden.write_nano
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.engine.deepseek_v41.borders import STABLE
from tests.engine.deepseek_v41.model_bench import ModelBench, nano_bench

TOKENS = 56
EVERY = 6
SEQUENCES = 6
DRAWS = 8
STABLE_ROWS = 0.7
FILE = Path(__file__).parent / "nano.npz"
KEPT = ("candidate_blocks", "experts", "topk")


def run(bench: ModelBench, ids: list[int]) -> dict[str, torch.Tensor]:
    """Logits, and what was chosen, of every EVERY-th token."""
    seen: dict[tuple[str, int], torch.Tensor] = {}
    state = bench.begin(len(ids))
    logits = bench.run(
        state, ids, observe=lambda name, layer, tensor: seen.update({(name, layer): tensor})
    )
    bench.end(state)
    chosen = {f"{name}_{layer}": t[::EVERY] for (name, layer), t in seen.items() if name in KEPT}
    return {"logits": logits[::EVERY], **chosen}


def main() -> None:
    bench = nano_bench()
    others = [nano_bench(noise_seed=seed) for seed in range(DRAWS)]
    generator = torch.Generator().manual_seed(77)
    rows: list[dict[str, torch.Tensor]] = []
    while len(rows) < SEQUENCES:
        ids = torch.randint(3, bench.model.config.vocabulary - 2, (TOKENS,), generator=generator)
        found = run(bench, ids.tolist())
        moved = [run(other, ids.tolist())["logits"] for other in others]
        noise = torch.stack([(it - found["logits"]).abs().amax(-1) for it in moved]).amax(0)
        if (noise < STABLE).float().mean() >= STABLE_ROWS:
            rows.append({"ids": ids, "noise": noise, **found})
    arrays = {name: torch.stack([row[name] for row in rows]).numpy() for name in rows[0]}
    packed = {n: a.astype(np.int16) if a.dtype == np.int64 else a for n, a in arrays.items()}
    np.savez_compressed(FILE, **packed)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
