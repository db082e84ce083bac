"""Checks what a caller of an `AgentClient` hands in, beyond what `arguments` checks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from ..agent_messages import KEYS_PER_MESSAGE_MAX, OFFER_TTL_S_MAX, TICKET_BYTES
from ..arena.run_layout import RUN_BLOCKS_MAX, RunCode
from ..errors import InvalidArgument, shown
from ..key import NAMESPACE_ID_BYTES, Namespace, TokenIds
from ..layout import BlockLayout, whole_number
from .agent_results import RunOffer
from .arena_run import ArenaRun
from .arguments import check_deadline, check_keys

DEADLINE_S_MAX = 3600.0
"""The longest that an agent takes; longer ones are cut to it."""
FINGERPRINT_BYTES = 32
HOST_CHARS_MAX = 64
CODE_SHARDS_MAX = 32
"""docs/formats/erasure-code.md."""
CLIENT_NAME_MAX = 128
"""Characters: `agent_messages.ShortName`."""


def is_key_chain(keys: Sequence[bytes] | TokenIds) -> TypeGuard[Sequence[bytes]]:
    """Whether these are keys and not token ids. Something that is neither is taken for keys, so
    that the message says what is wrong with it."""
    if isinstance(keys, np.ndarray | array | range):
        return False
    return len(keys) == 0 or whole_number(keys[0]) is None


def check_chain(namespace: Namespace, keys: Sequence[bytes]) -> None:
    """`keys` is a chain that one message can hold."""
    check_keys(namespace, keys)
    if len(keys) > KEYS_PER_MESSAGE_MAX:
        raise InvalidArgument(
            "keys", given=f"{len(keys)} keys", expected=f"at most {KEYS_PER_MESSAGE_MAX}"
        )


def bound_deadline(deadline_s: float) -> float:
    """A finite number of seconds above 0, at most an hour."""
    return min(check_deadline(deadline_s), DEADLINE_S_MAX)


def bound_ttl(ttl_s: float) -> float:
    """How long an offer is good: a finite number of seconds above 0, at most two minutes."""
    return min(check_deadline(ttl_s, "ttl_s"), OFFER_TTL_S_MAX)


def check_client_name(name: str) -> str:
    """As long a name as the agent takes."""
    if not isinstance(name, str) or len(name) > CLIENT_NAME_MAX:
        raise InvalidArgument(
            "name",
            given=shown(name),
            expected=f"a text of at most {CLIENT_NAME_MAX} characters",
        )
    return name


def check_run_blocks(blocks: int) -> None:
    """As many blocks as a run can have."""
    if type(blocks) is not int or not 1 <= blocks <= RUN_BLOCKS_MAX:
        raise InvalidArgument("blocks", given=repr(blocks), expected=f"1 to {RUN_BLOCKS_MAX}")


def check_leased_blocks(blocks: int, *, least: int, asked: int) -> None:
    """An agent leases what was asked for, or less if that was allowed."""
    if not least <= blocks <= asked:
        raise InvalidArgument("leased blocks", given=blocks, expected=f"{least} to {asked}")


def check_leased_code(code: tuple[int, int]) -> RunCode | None:
    """The code of the parity that a leased run has room for, if it has."""
    if code == (0, 0):
        return None
    if not all(1 <= shards <= CODE_SHARDS_MAX for shards in code):
        raise InvalidArgument(
            "code of a leased run", given=code, expected=f"k and m from 1 to {CODE_SHARDS_MAX}"
        )
    return RunCode(*code)


def check_offer(offer: RunOffer) -> None:
    """Something that `offer_run` may have returned, also where it has come over a network."""
    if not isinstance(offer, RunOffer):
        raise InvalidArgument("offer", given=type(offer).__name__, expected="a RunOffer")
    for name, data, length in (
        ("ticket", offer.ticket, TICKET_BYTES),
        ("namespace_id", offer.namespace_id, NAMESPACE_ID_BYTES),
        ("layout", offer.layout, FINGERPRINT_BYTES),
    ):
        if type(data) is not bytes or len(data) != length:
            raise InvalidArgument(
                f"{name} of the offer", given=shown(data), expected=f"{length} bytes"
            )
    if type(offer.host) is not str or len(offer.host) > HOST_CHARS_MAX:
        raise InvalidArgument(
            "host of the offer", given=shown(offer.host), expected="an address, or nothing"
        )
    check_run_blocks(offer.blocks)


def check_record_place(place: object, name: str) -> None:
    """There is something to take a window record from, or to put one into."""
    if place is None:
        raise InvalidArgument(name, given="None", expected=f"a buffer or an ArenaRun{_hint(place)}")


def _hint(run: object) -> str:
    """Where a None comes from."""
    return "; lease_run and lease_window give None when the arena is full" if run is None else ""


def check_is_run(run: object) -> None:
    """It is a run at all."""
    if not isinstance(run, ArenaRun):
        raise InvalidArgument("run", given=type(run).__name__, expected=f"an ArenaRun{_hint(run)}")


def check_run(run: ArenaRun, layout: BlockLayout, blocks: int) -> None:
    """The run was leased for this layout, and has room for so many blocks."""
    check_is_run(run)
    if run.layout.layout.fingerprint != layout.fingerprint:
        raise InvalidArgument(
            "run",
            given=f"one for blocks of {run.layout.layout.block_bytes} bytes of another layout",
            expected=f"one leased for blocks of {layout.block_bytes} bytes of this layout",
        )
    if blocks > run.blocks:
        raise InvalidArgument(
            "run", given=f"{run.blocks} blocks", expected=f"at least the {blocks} of the call"
        )
