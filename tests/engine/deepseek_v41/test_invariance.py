"""However a sequence is cut into passes, its cache bytes and its logits are the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.deepseek_v41 import selection
from engine.models.deepseek_v41.handover import pack_state
from engine.models.deepseek_v41.rows import Chunk
from engine.models.deepseek_v41.shipped import shipped_config

from .greedy import MODEL_ID
from .model_bench import ModelBench, nano_bench

CONFIG = shipped_config("v41-nano")
LENGTHS = (
    *(1, 7, 8, 9, 13),
    *(CONFIG.window - 1, CONFIG.window, CONFIG.window + 1),
    *(CONFIG.ring_rows - 1, CONFIG.ring_rows, CONFIG.ring_rows + 1),
    *(127, 128, 129, 130),
    *(255, 256, 257),
)
LENGTH_MAX = 300
SOME_LENGTHS = (1, 9, CONFIG.window, CONFIG.ring_rows, 128, 257)


def in_part(lengths: tuple[int, ...]) -> list[object]:
    """One of each kind of border; the others, beside it, are for `make torture`."""
    return [
        pytest.param(one, marks=[] if one in SOME_LENGTHS else [pytest.mark.torture])
        for one in lengths
    ]


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench()


@pytest.fixture(scope="module")
def token_ids(bench: ModelBench) -> list[int]:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, bench.model.config.vocabulary - 2, (LENGTH_MAX,), generator=generator)
    # Repeats, so that n-grams and index keys recur.
    ids[100:140] = ids[20:60]
    return ids.tolist()


class Reference:
    """Logits and cache of the prompt in one piece, for every length asked for."""

    def __init__(self, bench: ModelBench, token_ids: list[int]) -> None:
        self._bench = bench
        self._token_ids = token_ids
        self._runs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if length not in self._runs:
            self._runs[length] = run_fresh(self._bench, self._token_ids[:length], ())
        return self._runs[length]


@pytest.fixture(scope="module")
def reference(bench: ModelBench, token_ids: list[int]) -> Reference:
    return Reference(bench, token_ids)


def run_fresh(
    bench: ModelBench, token_ids: list[int], cuts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, blocks and state slot of a new sequence, both zeroed before."""
    state = bench.begin(len(token_ids))
    bench.blocks.memory[state.block_ids] = 0
    state.memory.zero_()
    logits = bench.run(state, token_ids, cuts)
    blocks, slot = bench.cache_bytes(state)
    bench.end(state)
    return logits, blocks, slot


def assert_equal_runs(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    assert torch.equal(given[1], expected[1]), "block bytes"
    assert torch.equal(given[2], expected[2]), "state bytes"
    assert torch.equal(given[0], expected[0]), "logits"


@pytest.mark.parametrize("length", in_part(LENGTHS))
def test_two_pieces_are_one_wherever_a_border_may_lie(
    bench: ModelBench, token_ids: list[int], reference: Reference, length: int
) -> None:
    whole = reference.of(LENGTH_MAX)
    cut = run_fresh(bench, token_ids, (length,))
    assert_equal_runs(cut, whole)


@pytest.mark.parametrize("length", in_part(LENGTHS))
def test_prefill_and_one_token_at_a_time_are_one_piece(
    bench: ModelBench, token_ids: list[int], reference: Reference, length: int
) -> None:
    whole = reference.of(length)
    cuts = (max(length - 8, 1), *(1,) * 8)
    assert_equal_runs(run_fresh(bench, token_ids[:length], cuts), whole)


@pytest.mark.parametrize("length", [40, pytest.param(150, marks=pytest.mark.torture)])
def test_token_by_token_is_one_piece(
    bench: ModelBench, token_ids: list[int], reference: Reference, length: int
) -> None:
    assert_equal_runs(run_fresh(bench, token_ids[:length], (1,) * length), reference.of(length))


@settings(max_examples=6)
@given(data=st.data())
def test_any_cut_is_one_piece(
    bench: ModelBench, token_ids: list[int], reference: Reference, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(1, 140), max_size=12))
    assert_equal_runs(run_fresh(bench, token_ids, tuple(cuts)), reference.of(LENGTH_MAX))


def test_slot_and_blocks_of_another_sequence_leave_no_trace(
    bench: ModelBench, token_ids: list[int], reference: Reference
) -> None:
    """Rings and blocks begin full of another sequence, or of bytes that are no numbers."""
    for fill in (0x7F, 0xFF):
        state = bench.begin(LENGTH_MAX)
        bench.blocks.memory[state.block_ids] = fill
        state.memory.fill_(fill)
        logits = bench.run(state, token_ids, (3, 130, 1))
        bench.end(state)
        assert torch.equal(logits, reference.of(LENGTH_MAX)[0])


def test_sequences_of_one_pass_do_not_see_each_other(
    bench: ModelBench, token_ids: list[int], reference: Reference
) -> None:
    lengths = (1, 9, 64, 130, 257)
    states = [bench.begin(length + 4) for length in lengths]
    results: list[list[torch.Tensor]] = [[] for _ in lengths]
    chunks = [
        Chunk(state=state, token_ids=token_ids[:length])
        for state, length in zip(states, lengths, strict=True)
    ]
    for parts, logits in zip(
        results, bench.model.forward(chunks, wants_all_logits=True).logits, strict=True
    ):
        parts.append(logits)
    for step in range(4):
        chunks = [
            Chunk(state=state, token_ids=[token_ids[length + step]])
            for state, length in zip(states, lengths, strict=True)
        ]
        for parts, logits in zip(results, bench.model.forward(chunks).logits, strict=True):
            parts.append(logits)
    for state, parts, length in zip(states, results, lengths, strict=True):
        assert torch.equal(torch.cat(parts), reference.of(length + 4)[0])
        alone = bench.begin(length + 4)
        bench.run(alone, token_ids[: length + 4])
        packed, packed_alone = (
            pack_state(its, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)
            for its in (state, alone)
        )
        assert packed == packed_alone
        bench.end(alone)
        bench.end(state)


@pytest.mark.parametrize("taken_back", [1, pytest.param(2, marks=pytest.mark.torture), 5])
def test_tokens_that_are_taken_back_leave_no_trace(
    bench: ModelBench, token_ids: list[int], reference: Reference, taken_back: int
) -> None:
    """Rejected drafts: run, rewound, and others run in their place."""
    for length in (20, 127, 128, 129, 255):
        state = bench.begin(LENGTH_MAX)
        parts = [bench.run(state, token_ids[:length])]
        wrong = [7] * taken_back
        bench.run(state, wrong)
        state.rewind(length)
        parts.append(bench.run(state, token_ids[length:], (1, 2, 5)))
        assert torch.equal(torch.cat(parts), reference.of(LENGTH_MAX)[0])
        bench.end(state)


def test_choices_in_pieces_are_the_choices_of_all(
    bench: ModelBench,
    token_ids: list[int],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt in one pass does not hold queries times entries of scores at a time."""
    monkeypatch.setattr(selection, "PIECE_SCORES", 1000)
    assert_equal_runs(run_fresh(bench, token_ids, ()), reference.of(LENGTH_MAX))


def test_sequence_past_help_does_not_harm_those_beside_it(
    bench: ModelBench, token_ids: list[int], reference: Reference
) -> None:
    """Bytes that are no numbers in its rings and blocks make its own logits NaN, and no others."""
    sick, well = bench.begin(LENGTH_MAX), bench.begin(LENGTH_MAX)
    bench.run(sick, token_ids[:140])
    bench.run(well, token_ids[:100])
    sick.memory.fill_(0xFF)
    bench.blocks.memory[sick.block_ids] = 0xFF
    chunks = [
        Chunk(state=sick, token_ids=token_ids[140:180]),
        Chunk(state=well, token_ids=token_ids[100:180]),
    ]
    logits = bench.model.forward(chunks, wants_all_logits=True).logits
    assert logits[0].isnan().any()
    assert torch.equal(logits[1], reference.of(180)[0][100:])
    bench.end(sick)
    bench.end(well)


def test_last_logits_alone_are_those_of_all(
    bench: ModelBench, token_ids: list[int], reference: Reference
) -> None:
    state = bench.begin(130)
    result = bench.model.forward([Chunk(state=state, token_ids=token_ids[:130])])
    assert torch.equal(result.logits[0], reference.of(130)[0][-1:])
    bench.end(state)


@pytest.fixture(autouse=True)
def no_leaks(bench: ModelBench) -> Iterator[None]:
    free = bench.blocks.free_blocks
    yield
    assert bench.blocks.free_blocks == free
