"""From the bytes of a ticket to a request that an engine takes without a look at its tokens.

Whatever takes longer the longer a prompt is, is done here, in a thread that is not the engine's;
and what a ticket can be refused for without its tokens is looked at before them.
"""

from typing import NamedTuple

import numpy as np

from kvstore.key import TOKEN_BYTES

from ..model_runner import ModelRunner
from ..request_checks import PreparedRequest, prepare_request
from .ticket import HandoverTicket, SentRun, expect, read_ticket


class ReadTicket(NamedTuple):
    """A ticket that is good, as far as can be said before its runs are taken."""

    ticket: HandoverTicket
    prepared: PreparedRequest


class TicketReader:
    """Reads tickets for one runner's engine. May be used in any thread."""

    def __init__(self, runner: ModelRunner, ticket_key: bytes) -> None:
        self._runner = runner
        self._key = ticket_key

    def read(self, data: bytes, request_id: str) -> ReadTicket:
        """The ticket, and its request as one of this engine's. Raises HandoverRefused for a ticket
        that is none, or of another model; InvalidRequest for one that never fits."""
        ticket = read_ticket(data, self._key)
        self._check_model(ticket)
        self._check_tokens(ticket)
        return ReadTicket(ticket, prepare_request(ticket.request(request_id), self._runner))

    def _check_model(self, ticket: HandoverTicket) -> None:
        """Of this model, by its namespace and the shapes of what was sent."""
        runner = self._runner
        given, own = ticket.namespace_id.hex(), runner.namespace.namespace_id.hex()
        expect("namespace", given, given == own, own)
        _check_sections("blocks", ticket.blocks, len(runner.namespace.layout.sections))
        if runner.state_layout is None:
            expect("state", "one", ticket.state is None, "none")
        else:
            _check_sections("state", ticket.state, len(runner.state_layout.sections))

    def _check_tokens(self, ticket: HandoverTicket) -> None:
        """By their number, and the largest id."""
        runner, encoded = self._runner, (ticket.prompt_ids, ticket.answer_ids)
        tokens = sum(map(len, encoded)) // TOKEN_BYTES
        most = runner.context_tokens - 1
        expect("tokens", tokens, tokens <= most, f"at most {most} (the model's context less one)")
        largest = max(int(np.frombuffer(ids, dtype="<i4").max()) for ids in encoded)
        expect("token id", largest, largest < runner.vocabulary, f"below {runner.vocabulary}")


def _check_sections(what: str, sent: SentRun | None, sections: int) -> None:
    given = 0 if sent is None else len(sent.section_xxh3)
    expect(f"sections of the {what}", given, given == sections, sections)
