"""Bits after a prompt: the whole computation is the scorer's, hits are computed as hits are."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import training.replay_bits
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.load import LoadedModel
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.weights import ModelWeights
from kvstore.policy import WINDOW_TOKENS
from training.model_bits import DocumentScorer
from training.replay_bits import PROMPT_TOKENS_MIN, PrefixJudge, read_answer
from training.replay_scores import Prefix, Reading

pytestmark = pytest.mark.slow

SEED = 3
PROMPTS, ANSWER_TOKENS = (PROMPT_TOKENS_MIN, 411), 9


@pytest.fixture(scope="module")
def config() -> DeepseekV41Config:
    """A window as wide as the released one: layers look back further than the decoder tail."""
    return replace(shipped_config("v41-nano"), window=WINDOW_TOKENS)


@pytest.fixture(scope="module")
def weights(config: DeepseekV41Config) -> ModelWeights:
    return random_weights(config, torch.Generator().manual_seed(SEED))


@pytest.fixture(scope="module")
def ids() -> NDArray[np.int64]:
    ids = np.random.default_rng(0).integers(3, 380, max(PROMPTS) + ANSWER_TOKENS)
    ids[0] = 0
    return ids


def judge(
    config: DeepseekV41Config, weights: ModelWeights, ids: NDArray[np.int64]
) -> list[dict[Prefix, Reading]]:
    loaded = LoadedModel(config, weights, torch.arange(config.vocabulary))
    one = PrefixJudge(loaded, tokens_max=len(ids))
    return one.judge(ids, prompt_lengths=PROMPTS, answer_tokens=ANSWER_TOKENS)


@pytest.fixture(scope="module")
def judged(
    config: DeepseekV41Config, weights: ModelWeights, ids: NDArray[np.int64]
) -> list[dict[Prefix, Reading]]:
    return judge(config, weights, ids)


def test_model_that_says_nothing_needs_the_same_every_way(
    config: DeepseekV41Config, weights: ModelWeights, ids: NDArray[np.int64]
) -> None:
    silent = replace(weights, head=torch.zeros_like(weights.head))
    for readings in judge(config, silent, ids):
        assert set(readings) == set(Prefix)
        for reading in readings.values():
            assert reading.bits == pytest.approx(ANSWER_TOKENS * math.log2(config.vocabulary))
            assert reading.divergence == pytest.approx(0, abs=1e-12)


def test_whole_prompt_has_the_bits_of_the_document(
    config: DeepseekV41Config,
    weights: ModelWeights,
    ids: NDArray[np.int64],
    judged: list[dict[Prefix, Reading]],
) -> None:
    loaded = LoadedModel(config, weights, torch.arange(config.vocabulary))
    scorer = DocumentScorer(loaded, tokens_max=len(ids))
    for prompt_tokens, readings in zip(PROMPTS, judged, strict=True):
        with_answer = scorer.read(ids[: prompt_tokens + ANSWER_TOKENS]).bits
        without = scorer.read(ids[:prompt_tokens]).bits
        assert readings[Prefix.WHOLE].bits == pytest.approx(with_answer - without)


def test_window_state_gives_the_bits_of_a_cold_prompt_and_any_other_way_gives_others(
    judged: list[dict[Prefix, Reading]],
) -> None:
    for readings in judged:
        assert readings[Prefix.WINDOW] == readings[Prefix.COLD]
        assert readings[Prefix.COLD].divergence == 0
        different = [Prefix.WHOLE, Prefix.COLD, Prefix.REPLAY, Prefix.CUT]
        assert len({readings[prefix].bits for prefix in different}) == 4
        assert all(readings[prefix].divergence > 0 for prefix in different if prefix != Prefix.COLD)


def test_bits_do_not_depend_on_the_chunks(
    config: DeepseekV41Config,
    weights: ModelWeights,
    ids: NDArray[np.int64],
    judged: list[dict[Prefix, Reading]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training.replay_bits, "CHUNK_TOKENS", 131)
    assert judge(config, weights, ids) == judged


def test_bits_and_divergence_are_those_of_the_softmax() -> None:
    logits_TV = torch.tensor([[0.0, math.log(3.0)], [math.log(7.0), 0.0]])
    even_TV = torch.zeros(2, 2)
    reading = read_answer(logits_TV, even_TV, np.array([0, 1]))
    assert reading.bits == pytest.approx(2 + 3)
    halves = [(1 / 4, 3 / 4), (7 / 8, 1 / 8)]
    expected = sum(0.5 * math.log2(0.5 / p) for pair in halves for p in pair)
    assert reading.divergence == pytest.approx(expected)
