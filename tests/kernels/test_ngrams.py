"""N-gram hashes: the released primes, multipliers and rows, and the rule token by token."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.ngrams import _is_prime, hash_ngrams, ngram_multipliers, plan_tables
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.row_invariance import check_row_invariance

RELEASED_LAYERS, RELEASED_VOCABULARY = (1, 14), 99_092
RELEASED_ROWS = (384_006_168, 384_016_682)
NGRAM_MAX, HEADS, BASE_ROWS, PAD = 4, 2, 60, 2
MASK = -1


def released_tables() -> tuple[torch.Tensor, torch.Tensor]:
    return plan_tables(tables=2, ngram_max=4, heads=8, base_rows=16_000_000)


def small_table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multipliers, primes and offsets of the second of two small tables."""
    primes, offsets = plan_tables(tables=2, ngram_max=NGRAM_MAX, heads=HEADS, base_rows=BASE_ROWS)
    return ngram_multipliers((1, 3), 200, NGRAM_MAX)[1], primes[1], offsets[1]


def rows_by_rule(ids: list[int], position: int) -> list[int]:
    """The rows of one token, from the rule, in Python's integers."""
    multipliers, primes, offsets = (x.tolist() for x in small_table())
    seen, is_over = [], False
    for lookback in range(NGRAM_MAX):
        at = position - lookback
        is_over = is_over or at < 0 or ids[at] == MASK
        seen.append(PAD if is_over else ids[at])
    rows = []
    for size, head in itertools.product(range(2, NGRAM_MAX + 1), range(HEADS)):
        mixed = 0
        for token, multiplier in zip(seen[:size], multipliers, strict=False):
            mixed ^= token * multiplier
        column = (size - 2) * HEADS + head
        rows.append(offsets[column] + mixed % primes[column])
    return rows


def hash_all(ids: list[int]) -> torch.Tensor:
    before = [MASK] * (NGRAM_MAX - 1)
    return hash_ngrams(torch.tensor(before + ids), *small_table(), PAD)


def test_primality_is_decided_as_by_trial_division() -> None:
    def divides(number: int) -> bool:
        return any(number % d == 0 for d in range(2, int(number**0.5) + 1))

    numbers = [*range(2, 5_000), *range(16_000_000, 16_000_200)]
    assert [_is_prime(n) for n in numbers] == [not divides(n) for n in numbers]


@pytest.mark.parametrize(
    "number",
    [
        # Carmichael numbers, and the least strong pseudoprimes of the first few witnesses.
        561, 41_041, 825_265, 2_047, 1_373_653, 25_326_001, 3_215_031_751, 2_152_302_898_747,
        341_550_071_728_321, 3_825_123_056_546_413_051,
    ],
)  # fmt: skip
def test_numbers_that_deceive_weaker_tests_are_not_prime(number: int) -> None:
    assert not _is_prime(number)


def test_tables_of_the_released_model_have_its_numbers_of_rows() -> None:
    primes, _ = released_tables()
    assert tuple(primes.sum(-1).tolist()) == RELEASED_ROWS
    assert len(set(primes.flatten().tolist())) == primes.numel()


@pytest.mark.parametrize("source", SOURCES)
def test_plans_are_the_golden_ones(source: str) -> None:
    golden = golden_vectors("engram", source)
    primes, offsets = released_tables()
    assert torch.equal(primes, golden["real_primes"].flatten(1))
    assert torch.equal(offsets, golden["real_offsets"])
    multipliers = ngram_multipliers(RELEASED_LAYERS, RELEASED_VOCABULARY, 4)
    assert torch.equal(multipliers, golden["real_multipliers"])


@pytest.mark.parametrize("source", SOURCES)
def test_rows_are_the_golden_ones(source: str) -> None:
    golden = golden_vectors("engram", source)
    ids, is_live = golden["real_compressed_ids"].to(torch.int64), golden["real_live_mask"]
    assert not is_live.all()
    primes, offsets = released_tables()
    multipliers = ngram_multipliers(RELEASED_LAYERS, RELEASED_VOCABULARY, 4)
    expected, expected_masked = golden["real_rows"], golden["real_rows_masked"]
    for table in range(2):
        plan = (multipliers[table], primes[table], offsets[table], PAD)
        rows = hash_ngrams(torch.nn.functional.pad(ids, (3, 0), value=MASK), *plan)
        assert torch.equal(rows[: len(expected)], expected[:, table])
        masked = torch.nn.functional.pad(torch.where(is_live, ids, MASK), (3, 0), value=MASK)
        rows = hash_ngrams(masked, *plan)
        assert torch.equal(rows[-len(expected_masked) :], expected_masked[:, table])


def test_products_of_ids_and_multipliers_never_overflow() -> None:
    for vocabulary in (1, 2, 200, RELEASED_VOCABULARY, 2**31):
        multipliers = ngram_multipliers(range(64), vocabulary, 4)
        assert int(multipliers.max()) * (vocabulary - 1) < 2**63
        assert int(multipliers.min()) > 0
        assert (multipliers % 2 == 1).all()


@given(ids=st.lists(st.one_of(st.just(MASK), st.integers(0, 199)), min_size=1, max_size=20))
def test_rows_are_those_of_the_rule(ids: list[int]) -> None:
    rows = hash_all(ids)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [rows_by_rule(ids, position) for position in range(len(ids))]


def test_rows_lie_in_the_range_of_their_column() -> None:
    multipliers, primes, offsets = small_table()
    ids = torch.randint(0, 200, (500,), generator=torch.Generator().manual_seed(0))
    rows = hash_ngrams(ids, multipliers, primes, offsets, PAD) - offsets
    assert ((rows >= 0) & (rows < primes)).all()


def test_masked_token_looks_like_pads_only() -> None:
    assert torch.equal(hash_all([5, 6, 7, MASK])[-1], hash_all([MASK])[-1])
    assert torch.equal(hash_all([5, 6, MASK, 8])[-1], hash_all([8])[-1])
    assert torch.equal(hash_all([MASK])[-1], hash_all([PAD])[-1])


def test_rows_do_not_depend_on_how_the_tokens_are_cut() -> None:
    ids = torch.randint(-1, 200, (33,), generator=torch.Generator().manual_seed(1))

    def rows_of(positions: torch.Tensor) -> torch.Tensor:
        windows = torch.stack([ids[p : p + NGRAM_MAX] for p in positions.tolist()])
        return hash_ngrams(windows, *small_table(), PAD).squeeze(-2)

    check_row_invariance(rows_of, 30)
    assert torch.equal(rows_of(torch.arange(30)), hash_ngrams(ids, *small_table(), PAD))
