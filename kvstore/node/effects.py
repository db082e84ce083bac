"""What an operation may ask of the one that runs it.

An operation is a generator: it yields one of these, and is resumed with the answer. So the same
operation runs on a connection of the event loop and, in a test, in a plain loop without sockets.
An operation is closed (GeneratorExit) at any other effect than Work when its peer goes away; a Work
that has begun is always answered, because a thread may still use what the operation holds.

Nobody changes an effect. They are not frozen because making a frozen one takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .waiting import Turn


@dataclass(slots=True)
class Send:
    """Hand these bytes to the peer; resumed with None when the kernel has taken them all.

    They must not change until then.
    """

    views: Sequence[memoryview]


class FileUnreadable(OSError):
    """A file that was being sent could not be read; the peer has a part of the frame."""

    def __init__(self, error: OSError, descriptor: int) -> None:
        super().__init__(error.errno, error.strerror or str(error))
        self.descriptor = descriptor


@dataclass(slots=True)
class SendFile:
    """Hand `head` to the peer and then bytes of files: (descriptor, offset, size in bytes) of each.

    Resumed with None when the kernel has taken them all, or with FileUnreadable: the frame that was
    begun cannot be completed then, and the peer is gone.
    """

    head: memoryview
    pieces: Sequence[tuple[int, int, int]]


@dataclass(slots=True)
class Receive:
    """Fill these views with the next bytes from the peer; resumed with None."""

    views: Sequence[memoryview]


@dataclass(slots=True)
class Drain:
    """Throw away the next bytes from the peer; resumed with None."""

    size_bytes: int


@dataclass(slots=True)
class Work:
    """Run this in a thread; resumed with what it returns, or with the OSError it raises."""

    call: Callable[[], Any]


@dataclass(slots=True)
class NeedBuffer:
    """Wait for memory until `due_s`; resumed with a Buffer, or None if none came in time.

    `is_for_write`: it will be filled by the peer, as fast as that likes.
    """

    size_bytes: int
    due_s: float
    is_for_write: bool = False


@dataclass(slots=True)
class NeedTurn:
    """Wait in line for a turn until `due_s`; resumed with whether it was given."""

    turn: Turn
    due_s: float


Effect: TypeAlias = Send | SendFile | Receive | Drain | Work | NeedBuffer | NeedTurn
Operation: TypeAlias = Generator[Effect, Any, None]
