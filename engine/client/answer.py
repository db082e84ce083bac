"""What a client knows of one answer, and which messages of workers fit it. Pure: no sockets, no
clock. Which worker is asked is `route`'s."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import count_of
from ..request import FinishReason
from ..sampling import Sampling
from ..worker.messages import Finished, Submit, Tokens, pack_tokens


class WorkerLost(Exception):
    """A worker is gone, silent, or says what cannot be; the request goes on elsewhere."""


class WorkerSilent(WorkerLost):
    """It took the connection, and says nothing."""


class WorkerAbsent(WorkerLost):
    """Nobody is at a worker's address: it has nothing of the request, and may be started again."""


@dataclass(slots=True, kw_only=True)
class AnswerProgress:
    """The answer so far. A position is given out once, and none is skipped."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    ttl_class: str
    token_ids: list[int] = field(default_factory=list)
    replay_first: int | None = None
    is_cut: bool = False
    """The model's context has ended it."""

    def accept(self, tokens: Tokens) -> tuple[int, ...]:
        """The tokens of a message that were not known before, one or more.

        Raises WorkerLost for a worker that leaves tokens out, says others than were given out
        before, none that are new, or some behind the end.
        """
        known = self.token_ids[tokens.position : tokens.position + len(tokens.token_ids)]
        new = tokens.token_ids[len(known) :]
        if tokens.position > len(self.token_ids):
            raise WorkerLost(
                f"it gave token {tokens.position} of the answer, expected {len(self.token_ids)}"
            )
        if known != list(tokens.token_ids[: len(known)]):
            raise WorkerLost(f"its tokens from {tokens.position} on differ from those before")
        if not new:
            # Each message makes the answer longer, so a worker cannot talk for ever.
            raise WorkerLost(f"it gave no token behind the first {len(self.token_ids)}")
        is_too_long = len(self.token_ids) + len(new) > self.max_tokens
        if self.finish_reason or is_too_long or not self.stop_ids.isdisjoint(new[:-1]):
            raise WorkerLost("it gave tokens behind the end of the answer")
        if not self.token_ids:
            self.replay_first = tokens.replay_first
        self.token_ids += new
        return new

    def finish(self, end: Finished) -> None:
        """The worker says that the answer is whole. Raises WorkerLost if it cannot be."""
        if self.finish_reason is not None:
            return
        if end.reason == "stop" or not self.token_ids:
            raise WorkerLost(f"it ended the answer after {count_of(len(self.token_ids), 'token')}")
        self.is_cut = True

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is whole, as far as is known."""
        if self.token_ids and self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if self.is_cut or len(self.token_ids) == self.max_tokens else None

    def submission(self) -> Submit:
        """The request as it is now."""
        return Submit(
            prompt_ids=pack_tokens(self.prompt_ids),
            max_tokens=self.max_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed,
            stop_ids=tuple(sorted(self.stop_ids)),
            ttl_class=self.ttl_class,
            answered_ids=pack_tokens(self.token_ids),
            replay_first=self.replay_first,
        )
