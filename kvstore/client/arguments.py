"""Checks what a caller hands in, before anything is sent.

Each failure is an `InvalidArgument` that names what was given and what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from erasure.code import BufferAddresses, ErasureError, addresses_of

from ..arena.region import RunMemory
from ..arena.run_layout import RunCode
from ..errors import InvalidArgument
from ..key import KEY_BYTES, Namespace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Rebuild: TypeAlias = Literal["agent", "reader"]
"""Who makes lost data shards out of parity: the agent, or whoever reads the run."""

_TTL_CLASS = re.compile(r"[a-z0-9_-]{1,16}")


def check_keys(namespace: Namespace, keys: Sequence[bytes]) -> None:
    """`keys` is a chain as `Namespace.block_keys` makes it."""
    if not isinstance(namespace, Namespace):
        raise InvalidArgument("namespace", given=type(namespace).__name__, expected="a Namespace")
    if {*map(type, keys)} <= {bytes} and {*map(len, keys)} <= {KEY_BYTES}:
        return
    for index, key in enumerate(keys):
        if type(key) is not bytes or len(key) != KEY_BYTES:
            length = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidArgument(f"keys[{index}]", given=length, expected=f"{KEY_BYTES} bytes")


def check_first_block(keys: Sequence[bytes], first_block: int) -> None:
    """`first_block` lies within the chain, or at its end."""
    if type(first_block) is not int or not 0 <= first_block <= len(keys):
        raise InvalidArgument(
            "first_block", given=repr(first_block), expected=f"0 to {len(keys)}, the keys given"
        )


def check_range(keys: Sequence[bytes], buffers: Sequence[ReadableBuffer], first_block: int) -> None:
    """There is one buffer for each key from `first_block` on."""
    check_first_block(keys, first_block)
    if len(buffers) != len(keys) - first_block:
        raise InvalidArgument(
            "buffers",
            given=f"{len(buffers)} buffers",
            expected=f"{len(keys) - first_block}, one for each of {len(keys)} keys from "
            f"block {first_block} on",
        )


def check_run(
    namespace: Namespace, keys: Sequence[bytes], run: RunMemory, first_block: int, place: int
) -> None:
    """The blocks of `keys` from `first_block` on fit into the run from its block `place` on."""
    check_first_block(keys, first_block)
    if not isinstance(run, RunMemory):
        raise InvalidArgument("run", given=type(run).__name__, expected="a RunMemory")
    if run.layout.layout.fingerprint != namespace.layout.fingerprint:
        raise InvalidArgument(
            "run",
            given=f"one of the layout {run.layout.layout.fingerprint.hex()[:16]}",
            expected=f"the namespace's layout {namespace.layout.fingerprint.hex()[:16]}",
        )
    room = run.layout.blocks - (len(keys) - first_block)
    if type(place) is not int or not 0 <= place <= room:
        raise InvalidArgument(
            "place",
            given=f"{place!r} for {len(keys) - first_block} blocks",
            expected=f"room for them in a run of {run.layout.blocks} blocks",
        )


def check_rebuild(rebuild: Rebuild) -> bool:
    """Is what is lost left to the reader?"""
    if rebuild not in ("agent", "reader"):
        raise InvalidArgument("rebuild", given=repr(rebuild), expected="agent or reader")
    return rebuild == "reader"


def check_parity_room(run: RunMemory, code: RunCode | None, *, is_by_layer: bool) -> None:
    """What is lost can be left to the reader of the run."""
    if not is_by_layer:
        raise InvalidArgument(
            "rebuild", given="reader, in block order", expected="reader in layer order only"
        )
    if code is None or run.layout.code != code:
        raise InvalidArgument(
            "run",
            given=f"one with room for the parity of {run.layout.code}",
            expected=f"room for the parity of {code}",
        )


def check_deadline(deadline_s: float, name: str = "deadline_s") -> float:
    """A finite number of seconds above 0."""
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not math.isfinite(deadline_s) or deadline_s <= 0:
        raise InvalidArgument(name, given=repr(deadline_s), expected="seconds above 0")
    return float(deadline_s)


def check_ttl_class(ttl_class: str) -> None:
    """1 to 16 of a-z, 0-9, `_` and `-`: it goes into every slot header."""
    if not isinstance(ttl_class, str) or not _TTL_CLASS.fullmatch(ttl_class):
        raise InvalidArgument(
            "ttl_class", given=repr(ttl_class), expected="1 to 16 of a-z, 0-9, '_' and '-'"
        )


def hold_buffers(
    buffers: Sequence[ReadableBuffer], block_bytes: int, *, writable: bool
) -> tuple[list[memoryview], BufferAddresses]:
    """Byte views and addresses of the caller's buffers; release the addresses to let them go."""
    held = _hold(
        buffers,
        block_bytes,
        writable=writable,
        name=lambda index: f"buffers[{index}]",
        kind="a block of the namespace's layout",
    )
    if writable:
        _check_apart(held)
    return [memoryview(buffer).cast("B") for buffer in buffers], held


def hold_record(
    record: ReadableBuffer, record_bytes: int, name: str, *, writable: bool
) -> tuple[list[memoryview], BufferAddresses]:
    """The same of the one buffer that a window record is in, or comes into."""
    held = _hold(
        [record],
        record_bytes,
        writable=writable,
        name=lambda _: name,
        kind="a record of the namespace's window layout",
    )
    return [memoryview(record).cast("B")], held


def _hold(
    buffers: Sequence[ReadableBuffer],
    length_bytes: int,
    *,
    writable: bool,
    name: Callable[[int], str],
    kind: str,
) -> BufferAddresses:
    """Addresses of buffers of one length. `name` is of the one at a position, `kind` of all."""
    try:
        held = addresses_of(buffers, writable=writable, name=name)
    except ErasureError as error:
        given = str(error.given).replace(".)", ")")  # some exporters say whole sentences
        raise InvalidArgument(
            error.what.removesuffix(" cannot be used"), given=given, expected=str(error.expected)
        ) from error
    for index, length in enumerate(held.lengths_bytes.tolist()):
        if length != length_bytes:
            held.release()
            raise InvalidArgument(
                name(index), given=f"{length} bytes", expected=f"{length_bytes} bytes, {kind}"
            )
    return held


def _check_apart(held: BufferAddresses) -> None:
    """No buffer shares a byte with another: a shard would be checked, then overwritten."""
    if len(held.addresses) < 2:
        return
    order = np.argsort(held.addresses)
    ends = held.addresses[order] + held.lengths_bytes[order].astype(np.uintp)
    shared = np.flatnonzero(held.addresses[order][1:] < ends[:-1])
    if len(shared):
        first, second = order[shared[0]], order[shared[0] + 1]
        held.release()
        raise InvalidArgument(
            "buffers",
            given=f"buffers[{first}] and buffers[{second}], which share memory",
            expected="memory of its own for each block",
        )
