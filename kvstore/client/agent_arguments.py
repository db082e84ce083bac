"""Checks what a caller of an `AgentClient` hands in, beyond what `arguments` checks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from ..agent_messages import KEYS_PER_MESSAGE_MAX
from ..arena.run_layout import RUN_BLOCKS_MAX
from ..errors import InvalidArgument
from ..key import Namespace, TokenIds
from ..layout import BlockLayout, whole_number
from .arena_run import ArenaRun
from .arguments import check_deadline, check_keys

DEADLINE_S_MAX = 3600.0
"""The longest that an agent takes; longer ones are cut to it."""
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


def check_client_name(name: str) -> str:
    """As long a name as the agent takes."""
    if not isinstance(name, str) or len(name) > CLIENT_NAME_MAX:
        raise InvalidArgument(
            "name",
            given=repr(name)[:80],
            expected=f"a text of at most {CLIENT_NAME_MAX} characters",
        )
    return name


def check_run_blocks(blocks: int) -> None:
    """As many blocks as a run can have."""
    if type(blocks) is not int or not 1 <= blocks <= RUN_BLOCKS_MAX:
        raise InvalidArgument("blocks", given=repr(blocks), expected=f"1 to {RUN_BLOCKS_MAX}")


def check_leased_blocks(blocks: int, *, asked: int) -> None:
    """An agent leases what was asked for, or less."""
    if blocks > asked:
        raise InvalidArgument("leased blocks", given=blocks, expected=f"at most {asked}")


def check_record_place(place: object, name: str) -> None:
    """There is something to take a window record from, or to put one into."""
    if place is None:
        raise InvalidArgument(name, given="None", expected=f"a buffer or an ArenaRun{_hint(place)}")


def _hint(run: object) -> str:
    """Where a None comes from."""
    return "; lease_run and lease_window give None when the arena is full" if run is None else ""


def check_run(run: ArenaRun, layout: BlockLayout, blocks: int) -> None:
    """The run was leased for this layout, and has room for so many blocks."""
    if not isinstance(run, ArenaRun):
        raise InvalidArgument("run", given=type(run).__name__, expected=f"an ArenaRun{_hint(run)}")
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
