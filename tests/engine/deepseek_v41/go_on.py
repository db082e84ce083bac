"""A fresh process that goes on with packed sequences: prints tokens and a digest of the logits."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from engine.threads import prepare_environment

TOKENS = 5


def main() -> None:
    """Arguments: a seed of the weights, and folders with state.bin and rest.json each."""
    prepare_environment()
    from engine.models.deepseek_v41.handover import unpack_state
    from tests.engine.deepseek_v41.greedy import MODEL_ID, go_on
    from tests.engine.deepseek_v41.model_bench import nano_bench

    bench = nano_bench(int(sys.argv[1]))
    for folder in map(Path, sys.argv[2:]):
        state = unpack_state(
            (folder / "state.bin").read_bytes(),
            states=bench.states,
            blocks=bench.blocks,
            model_id=MODEL_ID,
        )
        rest = json.loads((folder / "rest.json").read_text())
        tokens, logits = go_on(bench, state, rest, TOKENS)
        digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
        print(json.dumps({"tokens": tokens, "logits": digest}))  # noqa: T201
        bench.end(state)


if __name__ == "__main__":
    main()
