"""An engine that speaks the agent's socket by hand, so that tests see bytes and not a client."""

from __future__ import annotations

import array
import json
import os
import socket
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore import agent_messages as m
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RunLayout
from kvstore.key import Namespace
from kvstore.layout import BlockLayout

ANSWER_S = 20.0
AnswerT = TypeVar("AnswerT", bound=m.Message)


class RawEngine:
    """Blocking. `ask` sends one request and returns its answer, whatever else comes before it."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(ANSWER_S)
        self.socket.connect(os.fspath(path))
        self.region: ArenaRegion | None = None
        self.descriptors: deque[int] = deque()
        self.wakeups: dict[int, int] = {}
        """Reading ends, by the number of the run."""
        self._received = bytearray()
        self._answers: dict[int, m.Answer] = {}
        self._last_id = 0

    # Messages -------------------------------------------------------------------------------------

    def send(self, request: m.Message) -> int:
        """Its request id."""
        self._last_id += 1
        self.socket.sendall(m.pack_message(self._last_id, request))
        return self._last_id

    def answer(self, request_id: int) -> m.Answer:
        """The answer to a request; raises ConnectionError if the agent ends the session first."""
        while request_id not in self._answers:
            self.receive()
        return self._answers.pop(request_id)

    def ask(self, request: m.Message, kind: type[AnswerT]) -> AnswerT:
        answer = self.answer(self.send(request))
        assert isinstance(answer, kind), answer
        return answer

    def refusal(self, request: m.Message) -> m.Refused:
        return self.ask(request, m.Refused)

    def receive(self) -> None:
        """Takes what has come."""
        room = socket.CMSG_SPACE(16 * array.array("i").itemsize)
        data, beside, _, _ = self.socket.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
        for _, _, content in beside:
            self.descriptors.extend(array.array("i", content))
        if not data:
            raise ConnectionError("the agent ended the session")
        self._received += data
        while len(self._received) >= m.HEAD.size:
            length, request_id = m.HEAD.unpack_from(self._received)
            if len(self._received) < m.HEAD.size + length:
                return
            body = bytes(self._received[m.HEAD.size : m.HEAD.size + length])
            del self._received[: m.HEAD.size + length]
            self._answers[request_id] = m.answer_decoder.decode(body)

    def wait_until_ended(self) -> None:
        """Returns when the agent has closed the session."""
        try:
            while True:
                self.receive()
        except (ConnectionError, BrokenPipeError):
            return

    # What engines do ------------------------------------------------------------------------------

    def hello(self) -> m.Welcome:
        welcome = self.ask(m.Hello(version=m.PROTOCOL_VERSION, client="raw"), m.Welcome)
        if welcome.arena_bytes:
            descriptor = self.descriptors.popleft()
            self.region = ArenaRegion(descriptor)
            os.close(descriptor)
        return welcome

    def open(self, namespace: Namespace, window: BlockLayout | None = None) -> int:
        request = m.OpenNamespace(
            model=namespace.model,
            weights=namespace.weights,
            tokenizer=namespace.tokenizer,
            sections=rows_of(namespace.layout),
            lora=namespace.lora,
            tenant=namespace.tenant,
            window_sections=None if window is None else rows_of(window),
        )
        return self.ask(request, m.NamespaceOpened).namespace

    def lease(
        self, namespace: int, blocks: int, *, deadline_s: float = 5.0, is_window: bool = False
    ) -> m.RunLeased:
        request = m.LeaseRun(
            namespace=namespace, blocks=blocks, deadline_s=deadline_s, is_window=is_window
        )
        leased = self.ask(request, m.RunLeased)
        if leased.blocks:
            self.wakeups[leased.run] = self.descriptors.popleft()
        return leased

    def memory(self, leased: m.RunLeased, layout: BlockLayout) -> RunMemory:
        assert self.region is not None
        return self.region.run(leased.offset, RunLayout(layout, leased.blocks))

    def release(self, run: int) -> m.Done:
        return self.ask(m.ReleaseRun(run=run), m.Done)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask(m.AskStatus(), m.StatusTold).status)
        return found

    def close(self) -> None:
        self.socket.close()
        for descriptor in (*self.descriptors, *self.wakeups.values()):
            os.close(descriptor)
        self.descriptors.clear()
        self.wakeups.clear()
        if self.region is not None:
            self.region.close()
            self.region = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def rows_of(layout: BlockLayout) -> list[tuple[str, int]]:
    return [(section.name, section.bytes) for section in layout.sections]
