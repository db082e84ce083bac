"""Checks of what requests name. Pure.

Each raises InvalidArgument, which says what was given, or RequestRefused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import InvalidArgument
from ..key import KEY_BYTES
from ..layout import BlockLayout, Section
from .jobs import split_keys
from .leases import LeaseBook
from .options import Role
from .replies import RequestRefused
from .session import OpenedNamespace, Session
from .session_bounds import SessionBounds


def require_role(roles: Collection[Role], role: Role) -> None:
    """The agent has a role, or it refuses."""
    if role not in roles:
        raise RequestRefused(f"it has no role {role.value}")


def require_lease_room(book: LeaseBook, session: Session, bounds: SessionBounds) -> None:
    """The session may have or wait for one run more, or the agent refuses."""
    if book.runs_of(session.number) >= bounds.leases_max:
        raise RequestRefused(f"more than {bounds.leases_max} runs of one session")
    if book.waiting >= bounds.waiting_max:
        raise RequestRefused(f"more than {bounds.waiting_max} requests wait for a run")


def find_namespace(session: Session, number: int) -> OpenedNamespace:
    """The namespace to which the session gave this number."""
    if number >= len(session.namespaces):
        raise InvalidArgument("namespace", given=number, expected="one that this session opened")
    return session.namespaces[number]


def window_layout_of(opened: OpenedNamespace) -> BlockLayout:
    """Layout of the namespace's window state, which it must have."""
    if opened.window_layout is None:
        raise InvalidArgument("namespace", given="one without", expected="one with window sections")
    return opened.window_layout


def layout_of(sections: Sequence[tuple[str, int]]) -> BlockLayout:
    """A layout as it is sent."""
    return BlockLayout(tuple(Section(name, size) for name, size in sections))


def keys_of(joined: bytes) -> list[bytes]:
    """Keys as they are sent, one by one."""
    if len(joined) % KEY_BYTES:
        raise InvalidArgument(
            "keys", given=f"{len(joined)} bytes", expected=f"whole keys of {KEY_BYTES} bytes"
        )
    return split_keys(joined)
