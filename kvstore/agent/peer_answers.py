"""What an agent answers to each request of another agent, as values: no socket, no waiting.

Frames are received and sent by `peer_server`. Engines do not come here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from .. import wire
from ..errors import InvalidArgument
from ..window.directory_host import DirectoryHost
from ..window.messages import (
    WindowRequest,
    pack_answer,
    pack_hosts,
    parse_announcement,
    parse_window_request,
)
from ..window.peers import AGENT_TARGET
from ..window.record import WindowRecord
from .run_messages import pack_checksum, parse_piece, parse_take
from .run_sender import RunSender


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes into one frame."""

    body: bytes = b""
    count: int = 0
    status: wire.Status = wire.Status.OK
    payload: memoryview | None = None


class PeerAnswers:
    """Answers of one agent.

    `find`: the record of this host that is meant, or None. `status`: the document that STAT
    answers. `directory`: the part that this agent holds, or None. `offered`: what engines of this
    host have offered; None without an arena.
    """

    def __init__(
        self,
        *,
        cluster: bytes,
        find: Callable[[WindowRequest], WindowRecord | None],
        ttl_left_s: Callable[[WindowRecord], float],
        directory: DirectoryHost | None,
        status: Callable[[], dict[str, Any]],
        offered: RunSender | None,
    ) -> None:
        self.windows_sent = 0
        self.windows_absent = 0
        self._cluster = cluster
        self._find = find
        self._ttl_left_s = ttl_left_s
        self._directory = directory
        self._status = status
        self._offered = offered
        self._answer_by_op: dict[int, Callable[[wire.Header, bytes], Answer]] = {
            wire.Op.STAT: self._stat,
            wire.Op.LOOKUP: self._look_up,
            wire.Op.ANNOUNCE: self._announce,
            wire.Op.WINDOW: self._window,
            wire.Op.RUN: self._run,
            wire.Op.TAKE: self._take,
        }

    def greet(self, body: bytes) -> Answer:
        """The answer to HELLO; its peer is greeted if that is OK. FrameError for another body."""
        cluster, name = wire.parse_hello(body)
        if cluster != self._cluster:
            own = wire.pack_hello(self._cluster, AGENT_TARGET)
            return Answer(body=own, status=wire.Status.WRONG_CLUSTER)
        if name != AGENT_TARGET:
            text = f"target {name!r} is not here; this is an agent, {AGENT_TARGET!r}"
            return refusal(wire.Status.WRONG_TARGET, text)
        return Answer(body=body)

    def answer(self, header: wire.Header, body: bytes) -> Answer:
        """The answer to any other request, which `wire.check_request` has accepted."""
        answer = self._answer_by_op.get(header.op)
        if answer is None:
            text = f"{wire.Op(header.op).name} is for a storage node, and this is an agent"
            return refusal(wire.Status.BAD_REQUEST, text)
        try:
            return answer(header, body)
        except InvalidArgument as error:
            return refusal(wire.Status.BAD_REQUEST, str(error))

    def _stat(self, header: wire.Header, body: bytes) -> Answer:
        document = json.dumps(self._status(), separators=(",", ":")).encode()
        if len(document) > wire.BODY_BYTES_MAX:
            text = f"STAT would be {len(document)} bytes long, at most {wire.BODY_BYTES_MAX}"
            return refusal(wire.Status.BUSY, text)
        return Answer(body=document)

    def _look_up(self, header: wire.Header, body: bytes) -> Answer:
        hosts = self._part().look_up(wire.split_keys(body, header.count))
        return Answer(body=pack_hosts(hosts), count=header.count)

    def _announce(self, header: wire.Header, body: bytes) -> Answer:
        part = self._part()
        return Answer(body=pack_answer(part.announce(parse_announcement(body, header.count))))

    def _part(self) -> DirectoryHost:
        if self._directory is None:
            raise InvalidArgument(
                "LOOKUP or ANNOUNCE",
                given="to an agent without a part of the window directory",
                expected="an entrypoint of the cluster map",
            )
        return self._directory

    def _window(self, header: wire.Header, body: bytes) -> Answer:
        record = self._find(parse_window_request(body))
        if record is None:
            self.windows_absent += 1
            return Answer()
        self.windows_sent += 1
        head = record.pack_head(self._ttl_left_s(record))
        return Answer(body=head, count=1, payload=record.view)

    def _run(self, header: wire.Header, body: bytes) -> Answer:
        piece = parse_piece(body)
        data = None if self._offered is None else self._offered.read(piece)
        if data is None:
            return Answer()
        return Answer(body=pack_checksum(xxh3_64_intdigest(data)), count=1, payload=data)

    def _take(self, header: wire.Header, body: bytes) -> Answer:
        is_taken = self._offered is not None and self._offered.give_away(parse_take(body))
        return Answer(count=int(is_taken))


def refusal(status: wire.Status, text: str) -> Answer:
    """An answer that says to a person what is wrong."""
    return Answer(body=text.encode(errors="backslashreplace"), status=status)
