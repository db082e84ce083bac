"""A prompt whose first tokens run the encoder half only leaves the same state however it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.models.deepseek_v41.build_weights import build_weights
from engine.models.deepseek_v41.compression import plan_entries
from engine.models.deepseek_v41.draft import Drafter
from engine.models.deepseek_v41.handover import pack_state
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.rows import Chunk, plan_rows
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import SequenceState

from .greedy import MODEL_ID
from .model_bench import ModelBench, nano_bench

PROMPT = 150
TAIL_FIRST = 110


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench()


@pytest.fixture(scope="module")
def token_ids(bench: ModelBench) -> list[int]:
    generator = torch.Generator().manual_seed(31)
    return torch.randint(3, bench.model.config.vocabulary - 2, (200,), generator=generator).tolist()


def pack(bench: ModelBench, state: SequenceState) -> bytes:
    return pack_state(state, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)


def finish(bench: ModelBench, state: SequenceState, rest: Sequence[int]) -> torch.Tensor:
    """Logits of further tokens and of a draft after them; the end of the sequence."""
    logits = torch.cat((bench.run(state, rest), Drafter(bench.model).draft(state, 7).logits))
    bench.end(state)
    return logits


@pytest.mark.parametrize(
    "cuts",
    [
        *((1,), (110,), (140, 1, 1), (77, 33, 1)),
        *(
            pytest.param(cuts, marks=pytest.mark.torture)
            for cuts in ((109,), (111,), (50, 50, 20), (128, 8))
        ),
    ],
)
def test_tail_is_the_same_bits_in_any_pieces(
    bench: ModelBench, token_ids: list[int], cuts: tuple[int, ...]
) -> None:
    found = []
    for its_cuts in ((), cuts):
        state = bench.begin(len(token_ids))
        logits = bench.run(state, token_ids[:PROMPT], its_cuts, decoder_first=TAIL_FIRST)
        assert len(logits) == PROMPT - TAIL_FIRST
        found.append((logits, pack(bench, state), finish(bench, state, token_ids[PROMPT:])))
    (logits, packed, after), (cut_logits, cut_packed, cut_after) = found
    assert torch.equal(logits, cut_logits)
    assert packed == cut_packed
    assert torch.equal(after, cut_after)


def test_sequence_that_ends_in_the_encoder_does_not_see_who_goes_on(
    bench: ModelBench, token_ids: list[int]
) -> None:
    """One of two sequences has no row for the decoder half, at its beginning or later."""
    for before in (0, 40):
        packed, after = [], []
        for has_company in (False, True):
            state, other = bench.begin(len(token_ids)), bench.begin(20)
            bench.run(state, token_ids[:before]) if before else None
            chunks = [
                Chunk(state=state, token_ids=token_ids[before:PROMPT], decoder_first=PROMPT),
                Chunk(state=other, token_ids=token_ids[:20]),
            ]
            result = bench.model.forward(chunks[: 1 + has_company])
            assert [len(logits) for logits in result.logits] == [0, 1][: 1 + has_company]
            packed.append(pack(bench, state))
            after.append(finish(bench, state, token_ids[PROMPT:]))
            bench.end(other)
        assert packed[0] == packed[1]
        assert torch.equal(*after)


def test_rewind_below_the_tail_makes_it_begin_there(
    bench: ModelBench, token_ids: list[int]
) -> None:
    """As if the decoder half had begun at the length that is left: a token sees itself at least."""
    found = []
    for length, decoder_first, rewound in ((122, 120, 118), (118, 118, 118)):
        state = bench.begin(len(token_ids))
        bench.run(state, token_ids[:length], decoder_first=decoder_first)
        state.rewind(rewound)
        assert state.decoder_window_start == rewound
        found.append((Drafter(bench.model).draft(state, 7).logits, finish(bench, state, [8, 9])))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_draft_context_may_come_from_the_first_decoder_layer(token_ids: list[int]) -> None:
    config = shipped_config("v41-nano")
    first = config.decoder_start
    config = replace(
        config, draft=replace(config.draft, target_layer_ids=(first, first + 2, first + 3))
    )
    tensors = random_tensors(config, torch.Generator().manual_seed(5))
    ids = torch.arange(config.vocabulary) % 300
    bench = ModelBench.build(config, build_weights(config, tensors), ids)
    state = bench.begin(PROMPT)
    assert len(bench.run(state, token_ids[:PROMPT], decoder_first=TAIL_FIRST)) == 40
    assert len(state.read_window_rows(config.layers, PROMPT - config.window, PROMPT)) == 32


def test_tokens_after_a_piece_that_ended_in_the_encoder_see_themselves(
    bench: ModelBench, token_ids: list[int]
) -> None:
    """A tail that was to begin later than the prompt has come begins with the next token."""
    found = []
    for decoder_first in (100, 120):
        state = bench.begin(len(token_ids))
        assert len(bench.run(state, token_ids[:100], decoder_first=decoder_first)) == 0
        assert state.decoder_window_start == 100
        found.append(finish(bench, state, token_ids[100:130]))
    assert torch.equal(*found)


def test_entries_of_a_pass_are_planned_by_their_own_numbers(bench: ModelBench) -> None:
    """Group and tile of an entry follow from its number in its sequence, not from the pass."""
    long, short = bench.begin(40), bench.begin(40)
    bench.run(long, [5] * 21)
    chunks = [
        Chunk(state=long, token_ids=[5] * 8, entries_first=24),
        Chunk(state=short, token_ids=[5]),
        Chunk(state=bench.states.allocate(), token_ids=[5] * 5, entries_first=30),
    ]
    rows = plan_rows(chunks, bench.model.frequencies, torch.device("cpu"))
    for ratio, long_groups, short_groups in ((2, range(12, 14), range(0)), (1, range(24, 29), [0])):
        entries = plan_entries(rows, ratio)
        assert [list(groups) for groups in entries.groups] == [
            list(long_groups),
            list(short_groups),
            [],
        ]
        assert entries.tiles.positions_T.tolist() == [*long_groups, *short_groups]
    bench.states.release(chunks[2].state)
    bench.end(long)
    bench.end(short)
