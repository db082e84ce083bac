"""Sizes, codes and times: what is understood, and that a mistake is named in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.admin.quantities import (
    count_of,
    format_duration,
    format_ratio,
    format_size,
    parse_code,
    parse_duration_s,
    parse_ratio,
    parse_size_bytes,
)
from kvstore.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512B", 512),
        ("64KiB", 64 << 10),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 1TiB ", 1 << 40),
        ("1.5GiB", 3 << 29),
        ("0.1KiB", None),
        ("1152921504606846976", 1 << 60),
    ],
)
def test_size_is_read_as_written(text: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        with pytest.raises(InvalidArgument, match="a whole number of bytes"):
            parse_size_bytes("--target-size", text)
    else:
        assert parse_size_bytes("--target-size", text) == size_bytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a size such as 4GiB"),
        ("big", "a size such as 4GiB"),
        ("-4GiB", "a size such as 4GiB"),
        ("4,5GiB", "a size such as 4GiB"),
        ("4GiB and more", "a size such as 4GiB"),
        ("1e9", "a size such as 4GiB"),
        ("٤GiB", "a size such as 4GiB"),
        ("4GB", "; GiB?"),
        ("4g", "; GiB?"),
        ("4 parsecs", "units: KiB, MiB, GiB, TiB"),
        ("0", "1 byte to 2^60 bytes"),
        ("0GiB", "1 byte to 2^60 bytes"),
        ("1152921504606846977", "1 byte to 2^60 bytes"),
        ("9" * 400, "a size such as 4GiB"),
    ],
)
def test_size_with_a_mistake_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_size_bytes("--target-size", text)
    message = str(caught.value)
    assert message.startswith("--target-size: given ")
    assert repr(text)[:40] in message
    assert len(message) < 300
    assert words in message
    assert "\n" not in message


@given(st.integers(1, 1 << 60))
def test_size_in_bytes_is_itself(size_bytes: int) -> None:
    assert parse_size_bytes("size", str(size_bytes)) == size_bytes


@given(st.integers(1, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_shown_size_is_read_back(number: int, unit: str) -> None:
    size_bytes = parse_size_bytes("size", f"{number}{unit}")
    assert parse_size_bytes("size", format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 39, "2.5 TiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_size_is_shown_with_its_largest_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(("text", "k", "m"), [("10+2", 10, 2), ("1+0", 1, 0), (" 30+2 ", 30, 2)])
def test_code_is_read_as_written(text: str, k: int, m: int) -> None:
    code = parse_code("--code", text)
    assert (code.k, code.m) == (k, m)


@pytest.mark.parametrize(("text", "write_acks"), [("10+2", 11), ("4+2", 5), ("1+0", 1)])
def test_write_of_a_parsed_code_is_done_at_all_shards_but_one(text: str, write_acks: int) -> None:
    assert parse_code("--code", text).write_acks == write_acks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "K+M, data and parity shards of a block, such as 10+2"),
        ("10", "K+M"),
        ("10-2", "K+M"),
        ("10+2+1", "K+M"),
        ("ten+two", "K+M"),
        ("1.5+2", "K+M"),
        ("10+-2", "K+M"),
        ("0+2", "at least 1 data shard"),
        ("31+2", "at most 32 shards in all"),
        ("9999+9999", "at most 32 shards in all"),
    ],
)
def test_code_with_a_mistake_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_code("--code", text)
    message = str(caught.value)
    assert message.startswith("--code: given ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (3661.0, "1 h 1 min"),
        (3601.0, "1 h"),
        (86400.0 * 3 + 3600.0 * 4 + 59, "3 d 4 h"),
    ],
)
def test_time_is_shown_with_two_units(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("3d", 259_200),
        ("36h", 129_600),
        ("90min", 5_400),
        ("1d 12h", 129_600),
        ("1d12h", 129_600),
        (" 2 D ", 172_800),
        ("0.5h", 1_800),
        ("45s", 45),
        ("0s", 0),
    ],
)
def test_time_is_read_as_written(text: str, duration_s: int) -> None:
    assert parse_duration_s("TTL", text) == duration_s


@pytest.mark.parametrize(
    "text", ["", "3", "259200", "d", "3 weeks", "-1d", "1m", "3d x", "0.3s", "1e3s", "9999999999d"]
)
def test_time_without_a_known_unit_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^TTL: given .*, expected (a time|a whole|at most)"):
        parse_duration_s("TTL", text)


@given(st.integers(0, 3650 * 86_400))
def test_time_that_is_shown_can_be_read_again(duration_s: int) -> None:
    read_s = parse_duration_s("TTL", format_duration(duration_s))
    assert read_s <= duration_s
    assert duration_s - read_s < max(duration_s / 24, 1), "two units are shown"


@pytest.mark.parametrize(
    ("text", "ratio"), [("0.9", 0.9), ("90%", 0.9), ("85 %", 0.85), ("1", 1.0), ("12.5%", 0.125)]
)
def test_share_is_read_as_written(text: str, ratio: float) -> None:
    assert parse_ratio("--high", text) == ratio


def test_time_that_is_too_large_is_told_the_largest() -> None:
    with pytest.raises(InvalidArgument, match=r"expected at most 10 years \(3650d\)$"):
        parse_duration_s("TTL", "99999999999999999999d")


def test_share_that_looks_like_a_percentage_is_asked_whether_it_is_one() -> None:
    with pytest.raises(InvalidArgument, match=r"at most 1 or 100%; 95%\?$"):
        parse_ratio("--high", "95")
    with pytest.raises(InvalidArgument, match=r"at most 1 or 100%$"):
        parse_ratio("--high", "101%")


@pytest.mark.parametrize("text", ["", "90", "1.01", "101%", "-0.1", "nan", "0,9", "%"])
def test_share_above_one_or_strange_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="a share such as"):
        parse_ratio("--high", text)


def test_counts_agree_with_their_nouns() -> None:
    assert count_of(1, "node") == "1 node"
    assert count_of(0, "node") == "0 nodes"
    assert count_of(1_024, "block") == "1,024 blocks"
    assert count_of(2, "address", "addresses") == "2 addresses"
    assert (format_ratio(0.9), format_ratio(0.125), format_ratio(1)) == ("90 %", "12.5 %", "100 %")
