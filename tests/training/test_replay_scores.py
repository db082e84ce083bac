"""Scores of answers: sums by prompt length, differences by document, intervals over documents."""

import numpy as np
import pytest

from training.replay_scores import (
    Interval,
    JudgedAnswer,
    Prefix,
    Reading,
    bootstrap_interval,
    format_lengths,
    score_lengths,
)


def answer(path: str, prompt_tokens: int, size: int, cold: float, replay: float) -> JudgedAnswer:
    """Bits of a cold prompt and of one with a replay; the other ways are like the cold one."""
    readings = dict.fromkeys(Prefix, Reading(cold, 0.0))
    readings[Prefix.REPLAY] = Reading(replay, abs(replay - cold) / 2)
    return JudgedAnswer(
        path=path, prompt_tokens=prompt_tokens, answer_bytes=size, readings=readings
    )


ANSWERS = [
    answer("a", 700, 100, 50.0, 51.0),
    answer("b", 700, 300, 150.0, 154.0),
    answer("a", 400, 100, 70.0, 70.0),
]


def test_scores_are_sums_over_the_bytes_of_each_length_and_of_all() -> None:
    short, long, overall = score_lengths(ANSWERS)
    assert [score.prompt_tokens for score in (short, long, overall)] == [400, 700, None]
    assert [score.documents for score in (short, long, overall)] == [1, 2, 2]
    assert [score.answer_bytes for score in (short, long, overall)] == [100, 400, 500]
    by_prefix = {line.prefix: line for line in long.prefixes}
    assert by_prefix[Prefix.COLD].bits == pytest.approx(200 / 400)
    assert by_prefix[Prefix.REPLAY].bits == pytest.approx(205 / 400)
    assert by_prefix[Prefix.REPLAY].extra.value == pytest.approx(5 / 400)
    assert by_prefix[Prefix.REPLAY].divergence.value == pytest.approx(2.5 / 400)
    everywhere = {line.prefix: line for line in overall.prefixes}[Prefix.REPLAY]
    assert everywhere.extra.value == pytest.approx(5 / 500)


def test_interval_is_that_of_differences_and_not_of_documents() -> None:
    _, long, _ = score_lengths(ANSWERS)
    by_prefix = {line.prefix: line for line in long.prefixes}
    assert by_prefix[Prefix.WINDOW].extra == Interval(0.0, 0.0, 0.0)
    # Every draw of two documents: only the first, only the second, or both.
    assert by_prefix[Prefix.REPLAY].extra.low == pytest.approx(1 / 100)
    assert by_prefix[Prefix.REPLAY].extra.high == pytest.approx(4 / 300)


def test_interval_is_that_of_the_normal_distribution_when_documents_are_many() -> None:
    rng = np.random.default_rng(5)
    amounts_D = rng.normal(3.0, 2.0, 400)
    interval = bootstrap_interval(amounts_D, np.ones(400))
    error = amounts_D.std(ddof=1) / np.sqrt(400)
    assert interval.value == pytest.approx(amounts_D.mean())
    assert interval.low == pytest.approx(amounts_D.mean() - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(amounts_D.mean() + 1.96 * error, abs=0.1 * error)
    assert bootstrap_interval(amounts_D, np.ones(400)) == interval


def test_lines_tell_thousandths_of_a_bit() -> None:
    heading, *lines = format_lengths(score_lengths(ANSWERS))
    assert heading.split() == ["prompt", "cold", "whole", "window", "replay", "cut"]
    assert [line.split()[0] for line in lines[::2]] == ["400", "700", "all"]
    assert {line.split()[0] for line in lines[1::2]} == {"divergence"}
    assert "0.5000" in lines[2]
    assert "+12.50 [+10.00, +13.33]" in lines[2]
    assert "6.25 [5.00, 6.67]" in lines[3]
    assert len({len(line) for line in (heading, *lines)}) == 1
