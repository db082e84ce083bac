"""What agents say to each other about window records: bodies of LOOKUP, ANNOUNCE and WINDOW.

Pure: values in, bytes out, and back; frames are cut by `kvstore.wire`, the record itself is
`record`. The bytes stand in docs/formats/wire.md. A request whose length was checked may still say
something that no agent says; that is InvalidArgument, and the peer is told.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import wire
from ..errors import InvalidArgument, shown
from ..layout import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN

HOST_BYTES_MAX = wire.HOST.itemsize
TTL_MS_MAX = 86_400_000
"""A day: no setting allows a record to live longer."""
FLAG_LEAVING = 1
"""Of an announcement: the host ends; nothing of it is left."""
FLAG_NEW = 1
"""Of an answer: the part did not know the host, and must be told everything."""
SOMEBODY = 0
"""As instance of an announcement: the speaker is not the host; it may only withdraw."""

HOST_RULE = '"ip:port" of an agent, not 0.0.0.0 nor [::], with a port from 1 to 65535'


class AnnouncedItem(NamedTuple):
    """One record that the host has from now on, for `ttl_ms` more; 0: has no more."""

    key: bytes
    size_bytes: int
    ttl_ms: int


class Announcement(NamedTuple):
    """What one ANNOUNCE says. `records`: how many the host has, in all parts together."""

    host: str
    instance: int
    records: int = 0
    is_leaving: bool = False
    items: Sequence[AnnouncedItem] = ()


class AnnounceAnswer(NamedTuple):
    """What a part of the directory answers. `instance` is random once for a process."""

    instance: int
    entries: int
    host_entries: int
    is_new: bool


class WindowRequest(NamedTuple):
    """Which record is wanted. `layout`: the first 16 bytes of the fingerprint."""

    key: bytes
    namespace_id: bytes
    layout: bytes
    size_bytes: int


def is_host(address: str) -> bool:
    """Whether the text is an address that an agent can be reached at, without asking a name
    server: what a directory says must never make anybody look up a name."""
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
    if not colon or not is_port or not 0 < len(address) <= HOST_BYTES_MAX:
        return False
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        return False
    # No scope ("%eth0"): it means something on one machine only.
    has_scope = isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None
    is_reachable = not (ip.is_unspecified or ip.is_multicast or has_scope)
    return is_reachable and is_bracketed == (ip.version == 6)


def check_host(address: str) -> str:
    """The address; InvalidArgument unless `is_host`."""
    if not is_host(address):
        raise InvalidArgument("address of an agent", given=shown(address), expected=HOST_RULE)
    return address


def pack_announcement(said: Announcement) -> bytes:
    """Body of ANNOUNCE; `count` of its frame is the number of items."""
    head = np.zeros(1, wire.ANNOUNCE_HEAD)
    flags = FLAG_LEAVING if said.is_leaving else 0
    head[0] = (said.host.encode("ascii"), said.instance, said.records, flags)
    items = np.array([tuple(item) for item in said.items], wire.ANNOUNCE_ITEM)
    return head.tobytes() + items.tobytes()


def parse_announcement(body: bytes, count: int) -> Announcement:
    """Body of ANNOUNCE, its length being right. Raises InvalidArgument for what no agent says."""
    (host, instance, records, flags) = np.frombuffer(body, wire.ANNOUNCE_HEAD, 1)[0].tolist()
    rows = wire.parse_records(body, wire.ANNOUNCE_ITEM, count, wire.ANNOUNCE_HEAD.itemsize)
    sizes, ttls_ms = rows["bytes"], rows["ttl_ms"]
    is_kept = ttls_ms > 0
    if np.any(ttls_ms > TTL_MS_MAX):
        given = f"{int(ttls_ms.max())} ms"
        raise InvalidArgument("TTL of a record", given=given, expected=f"at most {TTL_MS_MAX} ms")
    if np.any(is_kept & ((sizes < BLOCK_BYTES_MIN) | (sizes > BLOCK_BYTES_MAX))):
        raise InvalidArgument(
            "bytes of a record",
            given="a size out of bounds",
            expected=f"{BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}",
        )
    if flags & ~FLAG_LEAVING or (flags and instance == SOMEBODY):
        raise InvalidArgument("flags of an announcement", given=flags, expected="0 or 1")
    if instance == SOMEBODY and np.any(is_kept):
        raise InvalidArgument(
            "announcement for another host", given="records", expected="withdrawals only"
        )
    items = [AnnouncedItem._make(row) for row in rows.tolist()]
    if len({item.key for item in items}) < count:
        raise InvalidArgument("announced keys", given="one of them twice", expected="each once")
    address = check_host(host.decode("ascii", "replace"))
    return Announcement(address, instance, records, bool(flags), items)


def pack_answer(answer: AnnounceAnswer) -> bytes:
    """Body of the answer to ANNOUNCE."""
    flags = FLAG_NEW if answer.is_new else 0
    row = (answer.instance, answer.entries, answer.host_entries, flags, 0)
    return np.array([row], wire.ANNOUNCE_ANSWER).tobytes()


def parse_answer(body: bytes) -> AnnounceAnswer:
    """Body of the answer to ANNOUNCE; FrameError if it is none."""
    rows = wire.parse_records(body, wire.ANNOUNCE_ANSWER, 1).tolist()
    instance, entries, host_entries, flags, _ = rows[0]
    return AnnounceAnswer(instance, entries, host_entries, bool(flags & FLAG_NEW))


def pack_hosts(hosts: Sequence[str | None]) -> bytes:
    """Body of the answer to LOOKUP."""
    return np.array([(host or "").encode("ascii") for host in hosts], wire.HOST).tobytes()


def parse_hosts(body: bytes, count: int) -> list[str | None]:
    """For each of the `count` keys of a LOOKUP the address of who has it, or None.

    FrameError for anything else, so that nobody connects to what is no address.
    """
    names = [row.decode("ascii", "replace") for row in wire.parse_records(body, wire.HOST, count)]
    strange = next((name for name in names if name and not is_host(name)), None)
    if strange is not None:
        raise wire.FrameError(f"host {strange!r}, expected {HOST_RULE}")
    return [name or None for name in names]


def pack_window_request(wanted: WindowRequest) -> bytes:
    """Body of WINDOW."""
    return np.array([(*wanted, 0)], wire.WINDOW_REQUEST).tobytes()


def parse_window_request(body: bytes) -> WindowRequest:
    """Body of WINDOW, its length being right."""
    *fields, _ = np.frombuffer(body, wire.WINDOW_REQUEST, 1)[0].tolist()
    return WindowRequest._make(fields)
