"""The errors of the engine, and what each means for the one who sees it.

    EngineError
    |-- ModelFileError       (also ValueError)         the model file cannot be used; all reasons
    |   `-- MissingModel     (also FileNotFoundError)  there is no model file
    |-- InvalidRequest       (also ValueError)         a caller's mistake; nothing was computed
    |   `-- RefusedRequest                             the same, in the words of a worker
    |-- HandoverRefused      (also ValueError)         these bytes are no sequence of this model
    |-- BlockPoolExhausted   (also MemoryError)        no free blocks for the request; retry later
    |-- StateSlotsExhausted  (also MemoryError)        no free state slot; retry later
    |-- DeviceFull           (also MemoryError)        the device has no memory for something
    |-- ArenaNotPinned       (also MemoryError)        the arena cannot be page-locked
    |-- MoverUnavailable                               this machine cannot move blocks that way
    |-- TransferFailed                                 bytes did not get to the device, or from it
    |   |-- TransferStuck                              nobody knows whether they still will
    |   |-- RebuiltWrong                               a node lies about its shard
    |   `-- DeviceLost                                 the device takes no more work at all
    |-- EngineBusy                                     too many requests wait; retry later
    |-- EngineClosed         (also RuntimeError)       the engine was used after its end
    `-- EnginesUnavailable   (also ConnectionError)    no engine worker answers a request

A store that fails is not here: the engine goes on without it and counts the fault. Broken
invariants are `assert`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import StoreError, describe_os_error, shorten

PROBLEMS_SHOWN = 12
"""Problems named in a message; a file of another architecture lacks hundreds of tensors."""


class EngineError(Exception):
    """Base of every error of this package. `exit_code` is what a command ends with."""

    exit_code = 1


class ModelFileError(EngineError, ValueError):
    """The model file has problems; `problems` lists every one of them."""

    exit_code = 2

    def __init__(self, path: str | Path, problems: list[str]) -> None:
        shown = "; ".join(problems[:PROBLEMS_SHOWN])
        rest = len(problems) - PROBLEMS_SHOWN
        more = f"; and {rest} more" if rest > 0 else ""
        super().__init__(
            f"model file {shorten(path)} has {len(problems)} problem(s): {shown}{more}"
        )
        self.path = Path(path)
        self.problems = problems


class MissingModel(ModelFileError, FileNotFoundError):
    """There is no model file where one was looked for."""

    def __init__(self, path: str | Path, detail: str) -> None:
        super().__init__(path, [detail])


class InvalidRequest(EngineError, ValueError):
    """A value from the caller breaks a rule; names the value given and the rule."""

    exit_code = 2

    def __init__(self, what: str, *, given: object, expected: str) -> None:
        super().__init__(f"{what}: given {shorten(given)}, expected {expected}")
        self.what = what
        self.given = given
        self.expected = expected


class RefusedRequest(InvalidRequest):
    """An engine worker would not take it, and no other one would; `given` is what it said."""

    def __init__(self, reason: str) -> None:
        EngineError.__init__(self, reason)
        self.what = "request"
        self.given = reason
        self.expected = "one that a worker takes"


class BlockPoolExhausted(EngineError, MemoryError):
    """The block pool has fewer free blocks than asked for; nothing was allocated."""

    def __init__(self, *, asked_blocks: int, free_blocks: int, capacity_blocks: int) -> None:
        super().__init__(
            f"block pool: asked for {asked_blocks} blocks, {free_blocks} of {capacity_blocks} free"
        )
        self.asked_blocks = asked_blocks
        self.free_blocks = free_blocks
        self.capacity_blocks = capacity_blocks


class StateSlotsExhausted(EngineError, MemoryError):
    """Every state slot is in use; nothing was allocated."""

    def __init__(self, *, slots: int) -> None:
        super().__init__(f"state pool: no slot of {slots} is free")
        self.slots = slots


class DeviceFull(EngineError, MemoryError):
    """The device has no memory left for something, of which nothing was made."""


class ArenaNotPinned(EngineError, MemoryError):
    """The arena of the host cannot be page-locked; transfers go through a small buffer instead."""

    def __init__(self, *, size_bytes: int, reason: str) -> None:
        super().__init__(f"arena of {size_bytes} bytes cannot be pinned: {reason}")
        self.size_bytes = size_bytes
        self.reason = reason


class MoverUnavailable(EngineError):
    """A way to move blocks cannot be had here; `lacks` says all that is missing for it."""

    exit_code = 2

    def __init__(self, name: str, lacks: Sequence[str]) -> None:
        super().__init__(f"mover {name}: {'; '.join(lacks)}")
        self.name = name
        self.lacks = list(lacks)


class TransferFailed(EngineError):
    """Bytes did not get into the pool, or out of it, and nothing writes them any more."""


class TransferStuck(TransferFailed):
    """A transfer has not ended for so long that the device must have failed."""


class RebuiltWrong(TransferFailed):
    """A block that was rebuilt is not what was stored: a node lies about its shard."""


class DeviceLost(TransferFailed):
    """An error of the device after which it takes no work of this process any more. The next pass
    meets it too, and ends the engine: nothing that is begun anew would end better."""


class EngineBusy(EngineError):
    """As many requests wait as may, or what `reason` says; this one was not taken. Retry later."""

    exit_code = 75

    def __init__(self, *, waiting_requests: int, reason: str = "") -> None:
        waiting = (
            "1 request waits" if waiting_requests == 1 else f"{waiting_requests} requests wait"
        )
        super().__init__(f"the engine is busy: {reason or waiting}; try again later")
        self.waiting_requests = waiting_requests


class HandoverRefused(EngineError, ValueError):
    """The bytes of a sequence that is handed over cannot be used; it goes on nowhere from them.

    `what` names the part that is wrong.
    """

    exit_code = 2

    def __init__(self, what: str, *, given: object, expected: object) -> None:
        super().__init__(f"hand-over: {what}: given {shorten(given)}, expected {expected}")
        self.what = what
        self.given = given
        self.expected = expected


class EngineClosed(EngineError, RuntimeError):
    """The engine was closed and is asked to do something."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation}: the engine is closed")
        self.operation = operation


class EnginesUnavailable(EngineError, ConnectionError):
    """No engine worker ends a request; `tried` says what became of the attempts."""

    exit_code = 4

    def __init__(self, why: str, tried: Sequence[str]) -> None:
        """`why` it was given up, after "no engine worker"."""
        super().__init__(f"no engine worker {why}: {'; '.join(tried[-PROBLEMS_SHOWN:])}")
        self.tried = list(tried)


def count_of(count: int, noun: str) -> str:
    """A number with its noun, such as "1 token" or "2 tokens"."""
    return f"{count} {noun if count == 1 else noun + 's'}"


def describe_in_one_line(error: Exception) -> str:
    """What a command says of the error that ends it."""
    if isinstance(error, OSError) and not isinstance(error, EngineError | StoreError):
        said = describe_os_error(error)
    else:
        said = str(error)
    return " ".join(said.split())


def reason_of(error: OSError) -> str:
    """In the system's words, without the address: asyncio and socket say it in them, as a tuple.
    Errors of a look-up of names have numbers of their own, which are negative."""
    if error.errno is None or error.errno <= 0:
        return (error.strerror or str(error)).partition(" (while ")[0]
    return os.strerror(error.errno)
