"""Numbers of many judged drafts: how many guesses are accepted, and how sure they were of it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedDraft:
    """`accepted`: leading guesses that are the model's own greedy choice. Of each guess:

    `confidence`, the sigmoid of what the confidence head says, and `overlap`, what it is trained
    to say: 1 - the total variation between the draft's distribution and the model's.
    """

    accepted: int
    confidence: Sequence[float]
    overlap: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessScore:
    """Of the guesses with one number in their drafts, 1 the first.

    A guess is reached if all before it were accepted. The shares and means from `share_of_reached`
    on are over reached guesses, and None if there are none: a confidence that is well calibrated
    for greedy choice is near `share_of_reached`, one that was well learnt near `overlap_mean`.
    """

    guess: int
    reached: int
    accepted: int
    share_of_drafts: float
    share_of_reached: float | None
    confidence_mean: float | None
    overlap_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftScore:
    """Over `drafts` drafts; `accepted_mean` guesses of each were accepted, of `len(guesses)`."""

    drafts: int
    accepted_mean: float
    guesses: list[GuessScore]


def sum_up(drafts: Sequence[JudgedDraft]) -> DraftScore:
    """All drafts together, one or more, of equally many guesses."""
    accepted = [draft.accepted for draft in drafts]
    return DraftScore(
        drafts=len(drafts),
        accepted_mean=sum(accepted) / len(drafts),
        guesses=[_score_guess(index, drafts) for index in range(len(drafts[0].confidence))],
    )


def _score_guess(index: int, drafts: Sequence[JudgedDraft]) -> GuessScore:
    reached = [draft for draft in drafts if draft.accepted >= index]
    accepted = sum(draft.accepted > index for draft in reached)
    return GuessScore(
        guess=index + 1,
        reached=len(reached),
        accepted=accepted,
        share_of_drafts=accepted / len(drafts),
        share_of_reached=accepted / len(reached) if reached else None,
        confidence_mean=_mean([draft.confidence[index] for draft in reached]),
        overlap_mean=_mean([draft.overlap[index] for draft in reached]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def format_drafts(score: DraftScore) -> list[str]:
    """Lines of text: one a guess, with "-" where nothing was reached."""
    columns = ("reached", "accepted", "of all", "of reached", "confidence", "overlap")
    lines = [
        f"{score.drafts} drafts, {score.accepted_mean:.2f} of {len(score.guesses)} guesses "
        "accepted by greedy choice",
        "  ".join(("guess", *columns)),
    ]
    for line in score.guesses:
        shares = (
            line.share_of_drafts,
            line.share_of_reached,
            line.confidence_mean,
            line.overlap_mean,
        )
        cells = [str(line.reached), str(line.accepted)]
        cells += ["-" if share is None else f"{share:.3f}" for share in shares]
        widths = zip(cells, columns, strict=True)
        lines.append(
            "  ".join([f"{line.guess:5}", *(f"{cell:>{len(name)}}" for cell, name in widths)])
        )
    return lines
