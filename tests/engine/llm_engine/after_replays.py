"""A store in which a replay has left what no cold run gives, and requests that do without it."""

from engine.request import Request
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    bench,
    prompt_of,
    request_of,
    summing,
)

PROMPT = prompt_of(650)


def what_a_replay_left() -> Kept:
    """Blocks of `PROMPT` up to 512, the last of them computed behind a replay, and the window
    there."""
    kept = Kept()
    with bench(summing, kept=kept) as one:
        one.add(request_of("cold", PROMPT[:400], 1))
        one.finish()
    kept.windows.clear()
    with bench(summing, kept=kept) as one:
        one.add(request_of("replayed", PROMPT[:600], 1))
        one.finish()
        assert one.report("replayed").replay_tokens == 128
    return kept


def add_without_the_store(one: EngineBench, request: Request) -> None:
    """Its match finds nothing."""
    one.source.is_held = True
    one.add(request)
    one.step()
    if one.source.loads[-1].found is None:
        one.source.loads[-1].answer(is_lost=True)
