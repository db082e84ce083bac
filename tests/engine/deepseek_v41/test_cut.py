"""A sequence cut at any token, as bytes, goes on in a fresh process as if nothing had been."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.models.deepseek_v41.handover import pack_state

from .go_on import TOKENS
from .greedy import MODEL_ID, go_on
from .model_bench import nano_bench

SEED = 5
ALL_CUTS = (1, 2, 31, 32, 33, 37, 38, 39, 127, 128, 129, 130, 255, 256, 257)
CUTS = (1, 33, 38, 128, 257)
"""One of each kind of border, beside it or at it."""
PROMPT = 260


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("cuts", [CUTS, pytest.param(ALL_CUTS, marks=pytest.mark.torture)])
def test_fresh_process_goes_on_with_equal_tokens_wherever_it_was_cut(
    tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    bench = nano_bench(SEED)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, bench.model.config.vocabulary - 2, (PROMPT,), generator=generator)
    prompt = ids.tolist()
    state = bench.begin(PROMPT)
    expected_tokens, logits = go_on(bench, state, prompt, TOKENS)
    expected = {
        "tokens": expected_tokens,
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
    }
    bench.end(state)
    folders = []
    for cut in cuts:
        folder = tmp_path / str(cut)
        folder.mkdir()
        state = bench.begin(cut)
        bench.run(state, prompt[:cut])
        packed = pack_state(state, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)
        bench.end(state)
        (folder / "state.bin").write_bytes(packed)
        (folder / "rest.json").write_text(json.dumps(prompt[cut:]))
        folders.append(folder)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.deepseek_v41.go_on", str(SEED), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == len(cuts)
    for cut, answer in zip(cuts, answers, strict=True):
        assert answer == expected, cut
