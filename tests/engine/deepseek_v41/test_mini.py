"""The trained model that comes with the project: what an approximation costs shows in its bits."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine.models.deepseek_v41.draft import Drafter
from engine.models.deepseek_v41.load import load_model

from .model_bench import ModelBench
from .test_invariance import assert_equal_runs, run_fresh

FOLDER = Path(__file__).parents[3] / "models" / "v41-mini"
TOKENS = 700
HIT = 512
REPLAYED = 128


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    loaded = load_model(FOLDER)
    return ModelBench.build(loaded.config, loaded.weights, loaded.compressed_ids_V)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    """The beginning of a module of the library; the figures below are not for held-out text."""
    text = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text()
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return [0, *tokenizer.encode(text).ids][:TOKENS]


def bits(logits: torch.Tensor, token_ids: list[int]) -> float:
    """Mean bits of the tokens that follow each row of logits."""
    following = torch.tensor(token_ids[-len(logits) :])[1:]
    return float(F.cross_entropy(logits[:-1], following)) / 0.6931471805599453


def test_text_costs_few_bits_and_any_cut_of_it_gives_equal_bits(
    bench: ModelBench, token_ids: list[int]
) -> None:
    whole = run_fresh(bench, token_ids, ())
    assert bits(whole[0], token_ids) < 3.5, "bits a token; 11 without a model"
    assert_equal_runs(run_fresh(bench, token_ids, (1, 129, 255, 64)), whole)


def test_replay_of_one_block_costs_little_and_rewrites_nothing(
    bench: ModelBench, token_ids: list[int]
) -> None:
    """Windows rebuilt from the 128 tokens before a hit are not those of a cold run, but near."""
    donor = bench.begin(TOKENS)
    cold = bench.run(donor, token_ids)[HIT:]
    before = bench.blocks.memory[donor.block_ids[: HIT // 128]].clone()
    state = bench.states.allocate()
    state.block_ids = donor.block_ids
    start = HIT - REPLAYED
    state.start_at(start, bench.model.recent_ids_of(token_ids[:start]))
    logits = bench.run(state, token_ids[start:], entries_first=HIT)[REPLAYED:]
    assert torch.equal(bench.blocks.memory[donor.block_ids[: HIT // 128]], before)
    assert not torch.equal(logits, cold)
    assert abs(bits(logits, token_ids) - bits(cold, token_ids)) < 0.05
    bench.states.release(state)
    bench.end(donor)


def test_decoder_tail_costs_little(bench: ModelBench, token_ids: list[int]) -> None:
    kept = bench.model.config.window + 12
    state = bench.begin(TOKENS)
    whole = bench.run(state, token_ids)[-12:]
    bench.end(state)
    state = bench.begin(TOKENS)
    logits = bench.run(state, token_ids, decoder_first=TOKENS - kept)[-12:]
    bench.end(state)
    assert not torch.equal(logits, whole)
    assert abs(bits(logits, token_ids) - bits(whole, token_ids)) < 0.3


def test_drafts_are_accepted_more_often_than_not_at_the_first_place(
    bench: ModelBench, token_ids: list[int]
) -> None:
    """Greedy: a guess is accepted if the model itself would choose it after those before."""
    drafter = Drafter(bench.model)
    state = bench.begin(TOKENS + 128)
    logits = bench.run(state, token_ids[:HIT])
    accepted = tried = 0
    for _ in range(12):
        known = int(logits[-1].argmax())
        guesses = drafter.draft(state, known).token_ids.tolist()
        logits = bench.run(state, [known, *guesses])
        choices = logits.argmax(-1).tolist()
        right = next((i for i, g in enumerate(guesses) if g != choices[i]), len(guesses))
        state.rewind(state.length - (len(guesses) - right))
        logits = logits[: right + 1]
        accepted += right
        tried += 1
    bench.end(state)
    assert accepted / tried > 0.8, f"{accepted / tried} of 5 guesses"


def test_example_of_the_model_card_runs() -> None:
    text = (FOLDER / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ended = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout.startswith("import argparse\n\n\nclass ")
    assert len(ended.stdout.splitlines()) > 4


def test_model_loaded_without_the_environment_for_equal_bits_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MKL_CBWR")
    with pytest.warns(RuntimeWarning, match="prepare_environment"):
        load_model(FOLDER)
