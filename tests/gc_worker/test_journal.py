"""The journal is there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gc_worker.journal import JOURNAL_NAME, Journal, pack_journal, parse_journal
from gc_worker.victims import BATCH_VICTIMS_MAX, VICTIM

GOLDEN_HEAD = "43414348 47434a31 02000000 00000000".replace(" ", "")


def victims_of(count: int) -> NDArray[Any]:
    rng = np.random.default_rng(count)
    return np.frombuffer(rng.bytes(count * VICTIM.itemsize), VICTIM).copy()


@pytest.mark.parametrize("count", [1, 2, BATCH_VICTIMS_MAX])
def test_journal_gives_back_what_was_written(tmp_path: Path, count: int) -> None:
    journal = Journal(tmp_path)
    journal.write(victims_of(count))
    assert Journal(tmp_path).read().tobytes() == victims_of(count).tobytes()
    journal.clear()
    journal.clear()
    assert len(Journal(tmp_path).read()) == 0


def test_journal_replaces_the_one_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(victims_of(5))
    journal.write(victims_of(2))
    assert len(journal.read()) == 2
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL_NAME]


def test_journal_has_the_bytes_that_its_format_says() -> None:
    victims = np.zeros(2, VICTIM)
    victims[0] = (7, 9, b"k" * 32, b"a" * 32, 11, 13, 17, 2, b"")
    content = pack_journal(victims)
    assert content[:16].hex() == GOLDEN_HEAD
    assert content[16:24].hex() == "227a687eca442f3c"
    assert len(content) == 24 + 2 * 104
    assert content[24:40].hex() == "07000000000000000900000000000000"
    assert content[40:104] == b"k" * 32 + b"a" * 32
    assert content[104:121].hex() == "0b000000000000000d0000001100000002"


@given(st.data())
def test_journal_is_refused_when_any_byte_is_another(data: st.DataObject) -> None:
    content = bytearray(pack_journal(victims_of(3)))
    at = data.draw(st.sampled_from([i for i in range(len(content)) if not 12 <= i < 16]))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"magic|bytes for|checksum"):
        parse_journal(bytes(content))


@given(st.binary(max_size=300))
def test_journal_is_refused_when_it_is_something_else(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"magic|bytes"):
        parse_journal(content)


def test_damaged_journal_is_removed(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_bytes(pack_journal(victims_of(3))[:-1])
    assert len(Journal(tmp_path).read()) == 0
    assert list(tmp_path.iterdir()) == []
