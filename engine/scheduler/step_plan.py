"""What one step of an engine computes: every answer by one token, and prompts as time allows. Pure.

    pass 1   a token of each answer, and the first chunks
    pass 2   the next chunks of those prompts that had to stop at a border, ...
    alone    one prompt whose prefix is still arriving, in passes of its own

A chunk ends at a multiple of 128, at a border of its sequence or with its last token. Prompts are
served in order: nobody behind gets what the one before could still use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .chunk import choose_chunk_tokens
from .cost import PrefillCost


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens computed_tokens .. known_tokens - 1 are to be computed, and no pass may cross one of
    the `borders` (ascending)."""

    computed_tokens: int
    known_tokens: int
    borders: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of prompt number `index` up to `end`."""

    index: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`passes[0]` runs with the tokens of answers. `alone_ends` are those of the arriving prompt's
    chunks, each in a pass of its own."""

    passes: tuple[tuple[Chunk, ...], ...]
    alone_ends: tuple[int, ...]


def plan_step(
    answer_tokens: Sequence[int],
    prefills: Iterable[Prefill],
    arriving: Prefill | None,
    *,
    cost: PrefillCost,
    budget_s: float,
) -> StepPlan:
    """`answer_tokens[i]` tokens stand before the one that answer i runs; it runs in any case.

    The first prompt gets a block at least, whatever is left of the budget: so it is not starved by
    answers. The one that is arriving gets what is left behind the others, or is the first.
    """
    budget = _Budget(cost, budget_s)
    passes: list[list[Chunk]] = []
    if answer_tokens:
        budget.charge_answers(answer_tokens)
        passes.append([])
    for index, prefill in enumerate(prefills):
        if not budget.is_spent:
            for number, end in enumerate(_chunk_ends(prefill, budget, open_passes=len(passes))):
                if number == len(passes):
                    passes.append([])
                passes[number].append(Chunk(index, end))
        if budget.is_spent:
            break
    alone_ends: tuple[int, ...] = ()
    if arriving is not None and not budget.is_spent:
        alone_ends = tuple(_chunk_ends(arriving, budget, open_passes=0))
    return StepPlan(passes=tuple(map(tuple, passes)), alone_ends=alone_ends)


class _Budget:
    """Seconds left of a step. Spent as soon as a prompt does not get all it could use.

    Whoever opens a pass pays for it, whoever joins one for being a further sequence of it.
    """

    def __init__(self, cost: PrefillCost, budget_s: float) -> None:
        self._cost = cost
        self._left_s = budget_s
        self._is_first = True
        self.is_spent = False

    def charge_answers(self, answer_tokens: Sequence[int]) -> None:
        cost = self._cost
        answers = len(answer_tokens)
        own_s = cost.a0_s + (answers - 1) * cost.a4_s + answers * (cost.a1_s + cost.a3_s)
        self._left_s -= own_s + cost.a2_s * sum(answer_tokens)

    def take(self, first: int, end: int, *, opens_pass: bool) -> int:
        """Where a chunk from `first` on ends that may reach to `end`; `first` if there is none."""
        left_s = self._left_s - (self._cost.a0_s if opens_pass else self._cost.a4_s)
        tokens = choose_chunk_tokens(
            self._cost,
            left_s,
            cached_tokens=first,
            tokens_left=end - first,
            is_first=self._is_first,
        )
        if tokens:
            self._left_s = left_s - self._cost.added_s(tokens, first)
            self._is_first = False
        self.is_spent = first + tokens < end
        return first + tokens


def _chunk_ends(prefill: Prefill, budget: _Budget, *, open_passes: int) -> list[int]:
    ends: list[int] = []
    position = prefill.computed_tokens
    while position < prefill.known_tokens and not budget.is_spent:
        border = min((at for at in prefill.borders if position < at), default=prefill.known_tokens)
        border = min(border, prefill.known_tokens)
        end = budget.take(position, border, opens_pass=len(ends) >= open_passes)
        if end > position:
            ends.append(end)
        position = end
    return ends
