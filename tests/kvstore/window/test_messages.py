"""Bodies of LOOKUP, ANNOUNCE and WINDOW: what is packed is parsed again, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import InvalidArgument
from kvstore.window.messages import (
    TTL_MS_MAX,
    AnnounceAnswer,
    AnnouncedItem,
    Announcement,
    WindowRequest,
    is_host,
    pack_announcement,
    pack_answer,
    pack_hosts,
    pack_window_request,
    parse_announcement,
    parse_answer,
    parse_hosts,
    parse_window_request,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32)
IDS = st.binary(min_size=16, max_size=16)
HOSTS = (
    st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"))
    .flatmap(lambda ip: st.integers(1, 65535).map(lambda port: f"{ip}:{port}"))
    .filter(is_host)
)
ITEMS = st.one_of(
    st.builds(AnnouncedItem, KEYS, st.integers(1 << 10, 16 << 20), st.integers(1, TTL_MS_MAX)),
    st.builds(AnnouncedItem, KEYS, U32, st.just(0)),
)


@given(
    said=st.builds(
        Announcement,
        HOSTS,
        st.integers(1, 2**64 - 1),
        U32,
        st.booleans(),
        st.lists(ITEMS, unique_by=lambda item: item.key),
    )
)
def test_announcement_is_parsed_into_what_it_was_packed_from(said: Announcement) -> None:
    body = pack_announcement(said)
    assert len(body) == 80 + 40 * len(said.items)
    assert parse_announcement(body, len(said.items)) == said


@given(body=st.binary(min_size=80, max_size=80 + 3 * 40))
def test_announcement_of_random_bytes_is_refused_or_obeys_the_rules(body: bytes) -> None:
    count = (len(body) - 80) // 40
    try:
        said = parse_announcement(body[: 80 + 40 * count], count)
    except InvalidArgument:
        return
    assert is_host(said.host)
    assert all(item.ttl_ms <= TTL_MS_MAX for item in said.items)


def test_announcement_is_refused_when_a_key_stands_in_it_twice() -> None:
    items = [AnnouncedItem(bytes([n]) * 32, 20_000, 1_000) for n in (1, 2, 1)]
    body = pack_announcement(Announcement("10.0.0.1:1", 1, 2, items=items))
    with pytest.raises(InvalidArgument, match="announced keys"):
        parse_announcement(body, 3)


@given(answer=st.builds(AnnounceAnswer, U64, U32, U32, st.booleans()))
def test_answer_is_parsed_into_what_it_was_packed_from(answer: AnnounceAnswer) -> None:
    assert parse_answer(pack_answer(answer)) == answer


@pytest.mark.parametrize("size", [0, 23, 25, 48])
def test_answer_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(wire.FrameError):
        parse_answer(bytes(size))


@given(hosts=st.lists(st.none() | HOSTS, max_size=20))
def test_hosts_are_parsed_into_what_they_were_packed_from(hosts: list[str | None]) -> None:
    assert parse_hosts(pack_hosts(hosts), len(hosts)) == hosts


@pytest.mark.parametrize("name", ["example:80", "0.0.0.0:80", "1.2.3.4", "x" * 64, "1.2.3.4:0"])
def test_hosts_are_refused_when_one_is_no_address(name: str) -> None:
    with pytest.raises(wire.FrameError, match="host"):
        parse_hosts(pack_hosts(["1.2.3.4:5", name]), 2)


@given(body=st.binary(max_size=200), count=st.integers(0, 3))
def test_hosts_of_random_bytes_are_refused_or_addresses(body: bytes, count: int) -> None:
    try:
        hosts = parse_hosts(body, count)
    except wire.FrameError:
        return
    assert all(host is None or is_host(host) for host in hosts)


@given(wanted=st.builds(WindowRequest, KEYS, IDS, IDS, U32))
def test_window_request_is_parsed_into_what_it_was_packed_from(wanted: WindowRequest) -> None:
    assert parse_window_request(pack_window_request(wanted)) == wanted


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:1", True),
        ("255.1.2.3:65535", True),
        ("[::1]:7", True),
        ("[2001:db8::ff00:42:8329]:7070", True),
        ("10.0.0.1:65536", False),
        ("10.0.0.1:-1", False),
        ("10.0.0.1:+1", False),
        ("10.0.0.1:", False),
        ("10.0.0.1", False),
        (":80", False),
        ("", False),
        ("localhost:80", False),
        ("10.0.0:80", False),
        ("::1:80", False),
        ("[10.0.0.1]:80", False),
        ("[::]:80", False),
        ("0.0.0.0:80", False),
        ("224.0.0.1:80", False),
        ("[ff02::1]:80", False),
        ("[fe80::1%eth0]:80", False),
        ("10.0.0.1:8\u0966", False),
        (" 10.0.0.1:80", False),
    ],
)
def test_host_is_an_ip_address_and_a_port_that_others_can_use(address: str, expected: bool) -> None:
    assert is_host(address) is expected
