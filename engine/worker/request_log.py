"""The line of a worker's log for each request that was begun: what was hit, and how it ended."""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

from ..request import FinishReason
from ..request_report import RequestReport

log = logging.getLogger(__name__)

Ending: TypeAlias = FinishReason | Literal["prefilled", "moved"]
"""`prefilled`: with its first token, to be handed over; `moved`: to be handed over in a drain."""


def log_end(request_id: str, ending: Ending, report: RequestReport) -> None:
    """To be called once a request, never for a token: the thread of the engine writes it."""
    log.info(
        "request=%s ended=%s prompt_tokens=%d hit_tokens=%d replay_tokens=%d fetched_tokens=%d "
        "shared_tokens=%d computed_tokens=%d answer_tokens=%d ttft_s=%.3f",
        request_id,
        ending,
        report.prompt_tokens,
        report.hit_tokens,
        report.replay_tokens,
        report.hit_tokens + report.replay_tokens - report.shared_tokens,
        report.shared_tokens,
        report.computed_tokens,
        report.answer_tokens,
        report.ttft_s,
    )
