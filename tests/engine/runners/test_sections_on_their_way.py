"""A pass over a prefix that arrives while it runs waits for each section, and may wait in vain."""

from __future__ import annotations

import pytest

from engine.model_runner import Part
from engine.sequence import Sequence
from kvstore.policy import MISS
from tests.engine.runners.runner_bench import RunnerBench, same_bits


class SectionsOnTheirWay:
    """Blocks of a hit that come section by section, each only when a pass waits for it."""

    def __init__(self, bench: RunnerBench, sequence: Sequence, stored: list[bytes]) -> None:
        self.waited_for: list[int] = []
        self._bench = bench
        self._sequence = sequence
        self._stored = stored
        sections = bench.runner.namespace.layout.sections
        ends = [sum(s.bytes for s in sections[: i + 1]) for i in range(len(sections))]
        self._runs = [slice(e - s.bytes, e) for e, s in zip(ends, sections, strict=True)]

    def wait(self, section: int) -> None:
        self.waited_for.append(section)
        run = self._runs[section]
        for block_id, data in zip(self._sequence.block_ids, self._stored, strict=False):
            self._bench.runner.pool.buffer(block_id)[run] = data[run]


def hit_on_its_way(
    bench: RunnerBench, token_ids: list[int], stored: list[bytes], window: bytes | None
) -> tuple[Sequence, SectionsOnTheirWay]:
    hit = bench.begin(token_ids)
    poison = [b"\xfe" * bench.runner.pool.block_bytes] * 2
    bench.fill_blocks(hit, poison)
    bench.runner.start_after(hit, bench.exact_hit(256), window)
    return hit, SectionsOnTheirWay(bench, hit, stored[:2])


def test_pass_waits_for_each_section_once_and_in_order_before_it_is_used(
    bench: RunnerBench,
) -> None:
    token_ids = bench.tokens(400)
    cold = bench.begin(token_ids)
    bench.run_to(cold, 256)
    window = bench.window_if_any(cold, 256)
    logits = bench.run(cold)
    stored = bench.complete_blocks(cold)
    hit, coming = hit_on_its_way(bench, token_ids, stored, window)
    (found,) = bench.runner.compute([Part(hit, 400)], wait_for_section=coming.wait)
    assert coming.waited_for == list(range(len(bench.runner.namespace.layout.sections)))
    assert found is not None
    assert same_bits(found, logits)
    bench.check_same_state(hit, cold)
    bench.end(cold, hit)


class NothingCame(Exception):
    pass


def test_pass_that_waits_in_vain_spoils_no_other_sequence_and_may_be_run_anew(
    bench: RunnerBench,
) -> None:
    token_ids = bench.tokens(400)
    cold = bench.begin(token_ids)
    bench.run_to(cold, 256)
    window = bench.window_if_any(cold, 256)
    logits = bench.run(cold)
    before = bench.pack(cold)
    for last in range(len(bench.runner.namespace.layout.sections)):
        hit, coming = hit_on_its_way(bench, token_ids, before.complete, window)

        def wait(section: int, last: int = last, coming: SectionsOnTheirWay = coming) -> None:
            if section == last:
                raise NothingCame
            coming.wait(section)

        with pytest.raises(NothingCame):
            bench.runner.compute([Part(hit, 400)], wait_for_section=wait)
        bench.runner.close(hit)
        bench.runner.open(hit)
        assert (hit.computed_tokens, hit.hit) == (0, MISS)
        if last == 0:
            assert same_bits(bench.run(hit), logits)
            bench.check_same_state(hit, cold)
        bench.end(hit)
    assert bench.pack(cold).complete == before.complete
    bench.end(cold)
