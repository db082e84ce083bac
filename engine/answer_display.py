"""What a command line says of an answer and its cost: a line for people, an object for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .errors import count_of

if TYPE_CHECKING:
    from kvstore.client import NodeReport
    from kvstore.errors import AgentError

    from .generate_options import Place
    from .generation import Generation
    from .remote_answer import RemoteAnswer
    from .save_receipt import SaveSummary


CUT_BY_CONTEXT = "ended by the model's context"


def describe(generation: Generation, max_tokens: int, *, store_errors: int) -> dict[str, Any]:
    """The JSON object of an answer from this process, without what is known before it.

    `max_tokens`: how long it might have become.
    """
    return _describe_answer(generation, max_tokens) | {
        "matched_tokens": generation.matched_tokens,
        "hit_tokens": generation.hit_tokens,
        "replay_tokens": generation.replay_tokens,
        "rejected_shards": generation.rejected_shards,
        "timings": _round_all(asdict(generation.timings)),
        "blocks": asdict(generation.receipt.summary()),
        "store_errors": store_errors,
    }


def summary_line(generation: Generation, max_tokens: int, *, store_errors: int) -> str:
    """What a person wants to know of a request, on one line."""
    timings, blocks = generation.timings, generation.receipt.summary()
    prompt = count_of(len(generation.prompt_ids), "token")
    parts = [
        f"prompt {prompt}, hit {describe_hit(generation.hit_tokens, generation.replay_tokens)}",
        f"first token {timings.ttft_s:.2f} s (match {timings.match_s:.3f}, "
        f"fetch {timings.fetch_s:.3f}, prefill {timings.prefill_s:.2f})",
        f"{count_of(len(generation.token_ids), 'token')}, {generation.decode_tokens_per_s:.0f}/s",
        f"blocks stored {blocks.stored}, known {blocks.known}, failed {blocks.failed}",
    ]
    if is_cut_by_context(generation, max_tokens):
        parts.insert(-1, CUT_BY_CONTEXT)
    if blocks.dropped or blocks.pending:
        parts.append(f"not saved {blocks.dropped + blocks.pending}")
    if store_errors:
        parts.append(f"store errors {store_errors}")
    return "[" + "; ".join(parts) + "]"


def describe_remote(answer: RemoteAnswer, max_tokens: int) -> dict[str, Any]:
    """The JSON object of an answer from workers, without what is known before it."""
    report = answer.report
    return _describe_answer(answer, max_tokens) | {
        "timings": _round_all({"ttft_s": report.ttft_s, "decode_s": report.decode_s}),
        "moves": report.moves,
        "tried": list(report.tried),
        "engines": list(report.engines),
    }


def remote_summary_line(answer: RemoteAnswer, max_tokens: int) -> str:
    """What a person wants to know of a request that workers answered, on one line."""
    report = answer.report
    first = report.engines[0] if report.engines else {}
    hit = describe_hit(first.get("hit_tokens", "unknown"), first.get("replay_tokens", 0))
    parts = [
        f"prompt {count_of(len(answer.prompt_ids), 'token')}, hit {hit}",
        f"first token {report.ttft_s:.2f} s",
        f"{count_of(len(answer.token_ids), 'token')}, {answer.decode_tokens_per_s:.0f}/s",
        describe_moves(report.moves),
    ]
    if is_cut_by_context(answer, max_tokens):
        parts.insert(-1, CUT_BY_CONTEXT)
    if report.tried:
        parts.append(f"tried again after: {'; '.join(report.tried)}")
    return "[" + "; ".join(parts) + "]"


def describe_hit(hit_tokens: object, replay_tokens: object) -> str:
    """How much was not computed, and what was computed again behind it."""
    replay = f" (and {replay_tokens} behind it replayed)" if replay_tokens else ""
    return f"{hit_tokens}{replay}"


def describe_moves(moves: int) -> str:
    """How often an answer went from one worker to another."""
    match moves:
        case 0:
            return "never moved"
        case 1:
            return "moved once"
        case 2:
            return "moved twice"
    return f"moved {moves} times"


def is_cut_by_context(answer: Generation | RemoteAnswer, max_tokens: int) -> bool:
    """Whether it would have gone on, had the model room for more tokens."""
    return answer.finish_reason == "length" and len(answer.token_ids) < max_tokens


def describe_dead_nodes(
    reports: Sequence[NodeReport], place: Place, blocks: SaveSummary, *, is_hit: bool
) -> str | None:
    """What to tell a user of whose request `blocks` were to be saved, and not all were; None if all
    nodes answer. `is_hit`: something was found."""
    alive = sum(report.is_alive for report in reports)
    if alive == len(reports):
        return None
    if is_hit or blocks.stored or blocks.known:
        so = _say_unsaved(blocks)
    else:
        so = "the answer was computed without the cache"
    return f"{alive} of {len(reports)} nodes answer; {so}{_advise(place)}"


def describe_silent_agent(error: AgentError, place: Place, blocks: SaveSummary) -> str:
    """What to tell a user whose agent does not even say which nodes answer."""
    if count_unsaved(blocks):
        return f"{error}; {_say_unsaved(blocks)}{_advise(place)}"
    return f"{error}; it was not needed for this answer"


def count_unsaved(blocks: SaveSummary) -> int:
    """Blocks that were to be saved, and that the store does not have."""
    return blocks.failed + blocks.dropped + blocks.pending


def _say_unsaved(blocks: SaveSummary) -> str:
    count = count_unsaved(blocks)
    return f"{count_of(count, 'block')} {'was' if count == 1 else 'were'} not saved"


def _advise(place: Place) -> str:
    """What helps against nodes that do not answer, in brackets."""
    if place.agent is not None:
        return f" (`cachalot status --socket {shlex.quote(str(place.agent))}` shows them)"
    if place.cluster is not None:
        folder = shlex.quote(str(place.cluster.parent))
        return f" (start them with `cachalot up --dir {folder}`)"
    return ""


def _describe_answer(answer: Generation | RemoteAnswer, max_tokens: int) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "prompt_token_ids": answer.prompt_ids,
        "finish_reason": answer.finish_reason,
        "is_cut_by_context": is_cut_by_context(answer, max_tokens),
        "prompt_tokens": len(answer.prompt_ids),
        "decode_tokens_per_s": round(answer.decode_tokens_per_s, 2),
    }


def _round_all(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
