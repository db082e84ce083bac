"""A request of the demo, and what became of it."""

from dataclasses import dataclass

from .claims import Claim
from .replies import Reply


@dataclass(frozen=True, slots=True)
class Request:
    """One of the seven requests, by its number from 1 on."""

    number: int
    title: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reply to a request, and every claim about it."""

    request: Request
    reply: Reply
    claims: tuple[Claim, ...]

    @property
    def broken_claims(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]
