"""The bytes of the format, fixed by files that the schoolbook arithmetic wrote."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from erasure.code import Code
from erasure.matrix import FIELD_POLYNOMIAL, cauchy_generator
from tests.erasure.write_golden import CODES, GOLDEN_DIR, golden_data, golden_path, golden_text

ROOT = Path(__file__).parents[2]

each_code = pytest.mark.parametrize(("k", "m"), CODES, ids=[f"{k}+{m}" for k, m in CODES])


def read_golden(k: int, m: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(golden_path(k, m).read_text())
    return document


def encoded(k: int, m: int, data: list[bytes]) -> list[bytes]:
    shard_bytes = len(data[0])
    parity = bytearray(m * shard_bytes)
    Code(k, m).encode([b"".join(data)], [parity], shard_bytes=shard_bytes)
    return [bytes(parity[i * shard_bytes : (i + 1) * shard_bytes]) for i in range(m)]


@each_code
def test_golden_file_is_what_its_writer_writes(k: int, m: int) -> None:
    assert golden_path(k, m).read_text() == golden_text(k, m)


def test_golden_folder_holds_nothing_else() -> None:
    assert set(GOLDEN_DIR.iterdir()) == {golden_path(k, m) for k, m in CODES}


@each_code
def test_generator_equals_golden_rows(k: int, m: int) -> None:
    golden = read_golden(k, m)
    assert hex(FIELD_POLYNOMIAL) == golden["field_polynomial"]
    rows = [row.tobytes().hex() for row in cauchy_generator(k, m)[k:]]
    assert rows == golden["parity_rows_hex"]


@each_code
def test_encode_gives_golden_parity_of_a_short_block(k: int, m: int) -> None:
    golden = read_golden(k, m)["short"]
    data = [bytes.fromhex(shard) for shard in golden["data_hex"]]
    assert [shard.hex() for shard in encoded(k, m, data)] == golden["parity_hex"]


@each_code
def test_encode_gives_golden_parity_of_a_longer_block(k: int, m: int) -> None:
    golden = read_golden(k, m)["long"]
    parity = encoded(k, m, golden_data(k, golden["shard_bytes"]))
    assert [hashlib.sha256(shard).hexdigest() for shard in parity] == golden["parity_sha256"]


@each_code
def test_reconstruct_gives_golden_data_when_as_many_shards_are_lost_as_may_be(
    k: int, m: int
) -> None:
    golden = read_golden(k, m)["short"]
    shards = [bytes.fromhex(shard) for shard in golden["data_hex"] + golden["parity_hex"]]
    lost = list(range(min(k, m)))
    left = list(range(len(lost), k + m))[:k]
    targets = [bytearray(golden["shard_bytes"]) for _ in lost]
    Code(k, m).reconstruct(
        lost, left, [[shards[j] for j in left]], [targets], shard_bytes=golden["shard_bytes"]
    )
    assert [bytes(target) for target in targets] == [shards[j] for j in lost]


def test_format_page_shows_golden_bytes() -> None:
    page = " ".join((ROOT / "docs" / "formats" / "erasure-code.md").read_text().split())
    golden = read_golden(4, 2)
    shown = [
        *read_golden(10, 2)["parity_rows_hex"],
        *golden["parity_rows_hex"],
        *golden["short"]["data_hex"],
        *golden["short"]["parity_hex"],
    ]
    for row in shown:
        assert bytes.fromhex(row).hex(" ") in page
