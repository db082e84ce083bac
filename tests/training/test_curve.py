"""The curve: round numbers on its axes, and each step of a run that was broken off once."""

import pytest

from training.curve import choose_ticks, draw, plan_panels
from training.training_log import Record, drop_superseded


def step(number: int, loss: float, kind: str = "step") -> Record:
    return {
        "part": "target",
        "kind": kind,
        "step": number,
        "elapsed_s": 6.0 * number,
        "loss": loss,
        "index_loss": loss / 10,
        "bits_per_byte": loss / 3,
    }


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 8.8, [0, 2, 4, 6, 8, 10]),
        (0.73, 1.55, [0.6, 0.8, 1.0, 1.2, 1.4, 1.6]),
        (1.1, 7.7, [0, 2, 4, 6, 8]),
        (-0.2, 0.2, [-0.2, -0.1, 0.0, 0.1, 0.2]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 900.0, [0, 200, 400, 600, 800, 1_000]),
    ],
)
def test_ticks_are_round_and_reach_around_the_values(
    low: float, high: float, ticks: list[float]
) -> None:
    assert choose_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_values_that_are_all_equal_have_ticks_around_them(value: float) -> None:
    ticks = choose_ticks(value, value)
    assert ticks[0] <= value <= ticks[-1]
    assert ticks[0] < ticks[-1]


def test_steps_that_were_taken_again_are_shown_once() -> None:
    first = [step(2, 3.0), step(4, 2.0), step(4, 2.0, "validation"), step(6, 1.0), step(8, 0.9)]
    again = [{"part": "run", "kind": "settings"}, step(6, 1.5), step(8, 1.4)]
    kept = drop_superseded([*first, *again])
    assert kept == [*first[:3], *again]
    loss = plan_panels([*first, *again])[0].series[0]
    assert loss.points == [(0.2, 3.0), (0.4, 2.0), (0.6, 1.5), (0.8, 1.4)]


def test_every_line_stays_within_its_panel() -> None:
    picture = draw(plan_panels([step(2, 3.0), step(4, 2.0), step(3, 2.5, "validation")]))
    assert picture.count("<polyline") == 3
    for line in picture.splitlines():
        if line.startswith("<polyline"):
            points = [tuple(map(float, p.split(","))) for p in line.split('"')[1].split()]
            assert all(64 <= x <= 684 and 36 <= y <= 256 for x, y in points)
