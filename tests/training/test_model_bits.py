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
from engine.models.deepseek_v41.load import LoadedModel
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
    loaded = LoadedModel(config, weights, torch.arange(config.vocabulary))
    return DocumentScorer(loaded, tokens_max=tokens_max)


def document(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    ids = np.random.default_rng(seed).integers(3, 380, 1 + tokens)
    ids[0] = 0
    return ids


def test_model_that_says_nothing_needs_the_logarithm_of_its_vocabulary(
    config: DeepseekV41Config, weights: ModelWeights
) -> None:
    silent = replace(weights, head=torch.zeros_like(weights.head))
    bits = scorer(config, silent).read(document(150)).bits
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
    assert scorer(config, weights).read(ids).bits == pytest.approx(bits)
    assert scorer(config, weights).read(ids[::-1].copy()).bits != pytest.approx(bits, rel=1e-3)


def test_bits_do_not_depend_on_the_chunks_or_on_earlier_documents(
    config: DeepseekV41Config, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = scorer(config, weights)
    used.read(document(290, seed=1))
    expected = scorer(config, weights).read(document(260)).bits
    for chunk_tokens in (512, 129, 64):
        monkeypatch.setattr(training.model_bits, "CHUNK_TOKENS", chunk_tokens)
        read = used.read(document(260), drafts=3)
        assert read.bits == pytest.approx(expected, abs=1e-9)
        assert len(read.drafts) == 3


def test_document_longer_than_the_room_is_refused(
    config: DeepseekV41Config, weights: ModelWeights
) -> None:
    small = scorer(config, weights, tokens_max=100)
    assert small.read(document(100)).bits > 0
    with pytest.raises(ValueError, match="given 101 tokens, expected at most 100"):
        small.read(document(101))


def test_drafts_stay_within_the_models_positions(
    config: DeepseekV41Config, weights: ModelWeights
) -> None:
    short = replace(config, positions_max=20)
    read = scorer(short, weights).read(document(20), drafts=100)
    # After 1 to 15 tokens: a draft has five positions of its own.
    assert len(read.drafts) == 15
    with pytest.raises(ValueError, match="given 21 tokens, expected at most 20"):
        scorer(short, weights).read(document(21))
