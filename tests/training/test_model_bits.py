"""Bits of a document by a DeepSeek-V4.1 model, by the way the engine runs it."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import training.model_bits
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.weights import ModelWeights
from tests.engine.deepseek_v41.model_bench import nano_bench
from training.model_bits import DocumentScorer

SEED = 3


@pytest.fixture(scope="module")
def config() -> DeepseekV41Config:
    return shipped_config("v41-nano")


@pytest.fixture(scope="module")
def weights(config: DeepseekV41Config) -> ModelWeights:
    return random_weights(config, torch.Generator().manual_seed(SEED))


def scorer(
    config: DeepseekV41Config, weights: ModelWeights, *, tokens_max: int = 300
) -> DocumentScorer:
    ids_V = torch.arange(config.vocabulary)
    return DocumentScorer(config, weights, ids_V, tokens_max=tokens_max)


def document(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    ids = np.random.default_rng(seed).integers(3, 380, 1 + tokens)
    ids[0] = 0
    return ids


def test_model_that_says_nothing_needs_the_logarithm_of_its_vocabulary(
    config: DeepseekV41Config, weights: ModelWeights
) -> None:
    silent = replace(weights, head=torch.zeros_like(weights.head))
    bits = scorer(config, silent).bits(document(150))
    assert bits == pytest.approx(150 * math.log2(config.vocabulary))


def test_bits_are_those_of_each_token_after_all_before_it(
    config: DeepseekV41Config, weights: ModelWeights
) -> None:
    ids = document(9)
    bench = nano_bench(seed=SEED)
    state = bench.begin(len(ids))
    bits = 0.0
    for token_id, following in pairwise(ids.tolist()):
        (logits_V,) = bench.run(state, [token_id])
        bits -= math.log2(torch.softmax(logits_V.double(), dim=0)[following])
    assert scorer(config, weights).bits(ids) == pytest.approx(bits)
    assert scorer(config, weights).bits(ids[::-1].copy()) != pytest.approx(bits, rel=1e-3)


def test_bits_do_not_depend_on_the_chunks_or_on_earlier_documents(
    config: DeepseekV41Config, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = scorer(config, weights)
    used.bits(document(290, seed=1))
    expected = scorer(config, weights).bits(document(260))
    for chunk_tokens in (512, 129, 64):
        monkeypatch.setattr(training.model_bits, "CHUNK_TOKENS", chunk_tokens)
        assert used.bits(document(260)) == pytest.approx(expected, abs=1e-9)


def test_document_longer_than_the_room_is_refused(
    config: DeepseekV41Config, weights: ModelWeights
) -> None:
    small = scorer(config, weights, tokens_max=100)
    assert small.bits(document(100)) > 0
    with pytest.raises(ValueError, match="given 101 tokens, expected at most 100"):
        small.bits(document(101))
