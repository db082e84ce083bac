"""Answers as the handling of requests hands them to a session: ready, or still to come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ..agent_messages import Answer, Refused
from ..errors import InvalidArgument, StoreError


class RequestRefused(StoreError):
    """The agent cannot serve a request that breaks no rule."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. A copy of `descriptor` goes beside it, which must be open until then."""

    message: Answer
    descriptor: int | None = None
    is_descriptor_given: bool = False
    """The session closes it, whether the answer can be sent or not."""
    is_last: bool = False
    """The session is closed once this is sent."""


@dataclass(slots=True, eq=False)
class Running:
    """A request that takes time. `on_end` is called when the work has ended, in whatever way,
    before the answer is sent."""

    work: Coroutine[Any, Any, Reply]
    on_end: Callable[[], None] | None = None
    when_cancelled: Reply | None = None
    """The answer if the work is cancelled and the session is not at its end."""
    is_awaited_at_stop: bool = False
    """An agent that stops waits a moment for this work, and sends its answer."""
    task: asyncio.Task[Reply] | None = None
    _is_cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Makes the work end. Only once: what it does to end cleanly must not be cancelled too."""
        assert self.task is not None
        # The task's own count would not do: a timeout inside of it cancels it for a moment, too.
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()


async def work_to_reply(running: Running) -> Reply:
    try:
        return await running.work
    except StoreError as error:
        return Reply(refusal_of(error))


def refusal_of(error: StoreError) -> Refused:
    """A typed error as an answer; it is the client's mistake if it says so."""
    if isinstance(error, InvalidArgument):
        return Refused(what=error.what, given=str(error.given), expected=error.expected)
    return Refused(what=str(error), is_mistake=False)
