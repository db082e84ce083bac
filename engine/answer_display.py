"""What a command line says of an answer and its cost: a line for people, an object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.client import NodeReport

    from .generation import Generation
    from .remote_answer import RemoteAnswer


def describe(generation: Generation, *, store_errors: int) -> dict[str, Any]:
    """The JSON object of an answer from this process, without what is known before it."""
    return _describe_answer(generation) | {
        "matched_tokens": generation.matched_tokens,
        "hit_tokens": generation.hit_tokens,
        "replay_tokens": generation.replay_tokens,
        "rejected_shards": generation.rejected_shards,
        "timings": _round_all(asdict(generation.timings)),
        "blocks": asdict(generation.receipt.summary()),
        "store_errors": store_errors,
    }


def summary_line(generation: Generation, *, store_errors: int) -> str:
    """What a person wants to know of a request, on one line."""
    timings, blocks = generation.timings, generation.receipt.summary()
    replay = f" (of it replayed {generation.replay_tokens})" if generation.replay_tokens else ""
    parts = [
        f"prompt {len(generation.prompt_ids)} tokens, hit {generation.hit_tokens}{replay}",
        f"first token {timings.ttft_s:.2f} s (match {timings.match_s:.3f}, "
        f"fetch {timings.fetch_s:.3f}, prefill {timings.prefill_s:.2f})",
        f"{len(generation.token_ids)} tokens, {generation.decode_tokens_per_s:.0f}/s",
        f"blocks stored {blocks.stored}, known {blocks.known}, failed {blocks.failed}",
    ]
    if blocks.dropped or blocks.pending:
        parts.append(f"not saved {blocks.dropped + blocks.pending}")
    if store_errors:
        parts.append(f"store errors {store_errors}")
    return "[" + "; ".join(parts) + "]"


def describe_remote(answer: RemoteAnswer) -> dict[str, Any]:
    """The JSON object of an answer from workers, without what is known before it."""
    report = answer.report
    return _describe_answer(answer) | {
        "timings": _round_all({"ttft_s": report.ttft_s, "decode_s": report.decode_s}),
        "moves": report.moves,
        "tried": list(report.tried),
        "engines": list(report.engines),
    }


def remote_summary_line(answer: RemoteAnswer) -> str:
    """What a person wants to know of a request that workers answered, on one line."""
    report = answer.report
    hit = report.engines[0].get("hit_tokens", "unknown") if report.engines else "unknown"
    parts = [
        f"prompt {len(answer.prompt_ids)} tokens, hit {hit}",
        f"first token {report.ttft_s:.2f} s",
        f"{len(answer.token_ids)} tokens, {answer.decode_tokens_per_s:.0f}/s",
        f"moved {report.moves} times",
    ]
    if report.tried:
        parts.append(f"tried again after: {'; '.join(report.tried)}")
    return "[" + "; ".join(parts) + "]"


def describe_dead_nodes(reports: Sequence[NodeReport], cluster: Path | None) -> str | None:
    """What to tell a user whose request got nothing from the store; None if all nodes answer."""
    alive = sum(report.is_alive for report in reports)
    if alive == len(reports):
        return None
    advice = "" if cluster is None else f" (start them with `cachalot up --dir {cluster.parent}`)"
    return (
        f"{alive} of {len(reports)} nodes answer; the answer was computed without the cache{advice}"
    )


def _describe_answer(answer: Generation | RemoteAnswer) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "prompt_token_ids": answer.prompt_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt_ids),
        "decode_tokens_per_s": round(answer.decode_tokens_per_s, 2),
    }


def _round_all(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
