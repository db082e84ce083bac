"""Tokens that are no text: images take no n-grams and experts of their own, pads fill lookbacks.

The golden model has images without embeddings, and maps its pad token to the id of the same number.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.models.deepseek_v41.handover import pack_state, unpack_state
from engine.models.deepseek_v41.rows import Chunk, ImageRows
from engine.models.deepseek_v41.state import SequenceState
from kernels.reference.ngrams import hash_ngrams, ngram_multipliers, plan_tables

from .greedy import MODEL_ID
from .model_bench import ModelBench, nano_bench

Seen = dict[tuple[str, int], torch.Tensor]
TOKENS = 70
IMAGE = slice(20, 45)
PAD_ID = 9


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    """Nano with a vocabulary in which no token has the compressed id of its own number."""
    base = nano_bench()
    vocabulary = base.model.config.vocabulary
    compressed_ids_V = (torch.arange(vocabulary) + PAD_ID - 2) % vocabulary
    return ModelBench.build(base.model.config, base.model.weights, compressed_ids_V)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(31)
    ids = torch.randint(3, 380, (TOKENS,), generator=generator)
    ids[IMAGE] = 382
    return ids.tolist()


IS_IMAGE = torch.zeros(TOKENS, dtype=torch.bool)
IS_IMAGE[IMAGE] = True


def embeddings(bench: ModelBench) -> torch.Tensor:
    """[T, E]; those of image rows are used."""
    generator = torch.Generator().manual_seed(32)
    return torch.randn(TOKENS, bench.model.config.hidden, generator=generator)


def run(
    bench: ModelBench, state: SequenceState, token_ids: list[int], end: int, seen: Seen
) -> torch.Tensor:
    """Logits of the tokens from the state's on to `end`, images with their embeddings."""
    piece = slice(state.length, end)
    is_image_T = IS_IMAGE[piece]
    chunk = Chunk(
        state=state,
        token_ids=token_ids[piece],
        image=ImageRows(is_image_T=is_image_T, embeddings=embeddings(bench)[piece][is_image_T]),
    )

    def observe(name: str, layer: int, tensor: torch.Tensor) -> None:
        seen[name, layer] = tensor

    return bench.model.forward([chunk], wants_all_logits=True, observe=observe).logits[0]


def expected_rows(bench: ModelBench, token_ids: list[int], table: int) -> torch.Tensor:
    engram = bench.model.config.engram
    assert engram is not None
    primes, offsets = plan_tables(
        tables=len(engram.layer_ids),
        ngram_max=engram.ngram_max,
        heads=engram.heads,
        base_rows=engram.base_rows,
    )
    multipliers = ngram_multipliers(
        engram.layer_ids, engram.compressed_vocabulary, engram.ngram_max
    )
    vocabulary = bench.model.config.vocabulary
    ids = (torch.tensor(token_ids) + PAD_ID - 2) % vocabulary
    ids[IS_IMAGE] = -1
    before = torch.full((engram.ngram_max - 1,), -1)
    return hash_ngrams(
        torch.cat((before, ids)), multipliers[table], primes[table], offsets[table], PAD_ID
    )


def test_lookbacks_are_padded_by_the_compressed_id_of_the_pad_token(
    bench: ModelBench, token_ids: list[int]
) -> None:
    seen: Seen = {}
    state = bench.begin(TOKENS)
    run(bench, state, token_ids, TOKENS, seen)
    bench.end(state)
    engram = bench.model.config.engram
    assert engram is not None
    for table, layer in enumerate(engram.layer_ids):
        rows_TC = seen["engram_rows", layer]
        assert torch.equal(rows_TC, expected_rows(bench, token_ids, table))
        # All tokens of an image look up the same rows, those of pads alone.
        assert (rows_TC[IS_IMAGE] == rows_TC[IMAGE.start]).all()
        assert (rows_TC[~IS_IMAGE] != rows_TC[IMAGE.start]).any()


def test_engram_leaves_the_streams_of_image_tokens_as_they_are(
    bench: ModelBench, token_ids: list[int]
) -> None:
    seen: Seen = {}
    state = bench.begin(TOKENS)
    run(bench, state, token_ids, TOKENS, seen)
    bench.end(state)
    engram = bench.model.config.engram
    assert engram is not None
    for layer in engram.layer_ids:
        before, after = seen["streams", layer - 1], seen["engram_out", layer]
        assert torch.equal(after[IS_IMAGE], before[IS_IMAGE])
        assert (after[~IS_IMAGE] != before[~IS_IMAGE]).any(-1).any(-1).all()


def test_image_tokens_choose_experts_by_a_bias_of_their_own(token_ids: list[int]) -> None:
    base = nano_bench()
    config = base.model.config
    favoured = torch.zeros(config.experts)
    favoured[[1, 6]] = 1e3
    layers = tuple(
        replace(layer, experts=replace(layer.experts, bias_image=favoured))
        for layer in base.model.weights.layers
    )
    weights = replace(base.model.weights, layers=layers)
    bench = ModelBench.build(config, weights, torch.arange(config.vocabulary))
    seen: Seen = {}
    run(bench, bench.begin(TOKENS), token_ids, TOKENS, seen)
    for layer in range(config.layers):
        experts_TK = seen["experts", layer]
        assert (experts_TK[IS_IMAGE] == torch.tensor([1, 6])).all()
        assert not (experts_TK[~IS_IMAGE] == torch.tensor([1, 6])).all()


@pytest.mark.parametrize("cut", [19, 20, 21, 33, 44, 45, 46, 48])
def test_image_may_be_cut_anywhere_and_handed_over_there(
    bench: ModelBench, token_ids: list[int], cut: int
) -> None:
    state = bench.begin(TOKENS)
    whole = run(bench, state, token_ids, TOKENS, {})
    bench.end(state)
    state = bench.begin(TOKENS)
    first = run(bench, state, token_ids, cut, {})
    packed = pack_state(state, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)
    bench.end(state)
    state = unpack_state(packed, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)
    rest = run(bench, state, token_ids, TOKENS, {})
    bench.end(state)
    assert torch.equal(torch.cat((first, rest)), whole)
