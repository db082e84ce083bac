"""What a session may cost, and what all of them may together. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBounds:
    """Bounds of the agent's socket; docs/formats/agent-socket.md says what happens at each."""

    sessions_max: int = 4096
    namespaces_max: int = 256
    """Of one session."""
    sections_max: int = 16_384
    """Sections of all namespaces of one session: these are what a namespace takes memory for."""
    leases_max: int = 256
    """Runs that one session has or waits for."""
    requests_max: int = 1024
    """Of one session, not answered yet."""
    waiting_max: int = 16_384
    """Requests for a run that wait in line, of all sessions."""
    unsent_bytes_max: int = 4 << 20
    """Answers that one session has not read, and what holds them (answer_queue)."""
    total_unsent_bytes_max: int = 256 << 20
    """The same of all sessions."""
    unsent_descriptors_max: int = 256
    """Descriptors beside them: each is a copy, whatever became of its run since."""
    requests_per_visit_max: int = 16
    """After so many of one session the others have their turn."""
    copied_per_turn_bytes_max: int = 4 << 20
    """Window records of all sessions that are copied in one turn of the event loop: about 3 ms."""
    request_bytes_max: int = 32 << 20
    """Requests of one session that are begun, or not answered yet."""
    total_request_bytes_max: int = 256 << 20
    """The same of all sessions."""
    message_s: float = 10.0
    """A begun message must be complete, and the first one be there, after so long."""


class ByteBudget:
    """So many bytes may be taken at one time."""

    __slots__ = ("_limit_bytes", "taken_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    def try_take(self, length_bytes: int) -> bool:
        """Whether they were left; then they are taken."""
        if self.taken_bytes + length_bytes > self._limit_bytes:
            return False
        self.taken_bytes += length_bytes
        return True

    def give(self, length_bytes: int) -> None:
        """They are free again."""
        self.taken_bytes -= length_bytes
        assert self.taken_bytes >= 0, self.taken_bytes
