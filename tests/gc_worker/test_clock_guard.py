"""A clock that is set by days expires nothing."""

from __future__ import annotations

import pytest

from gc_worker.clock_guard import STABLE_AFTER_S, ClockGuard, ClockState

DAY_S = 86_400.0


def look(guard: ClockGuard, monotonic_s: float, offset_s: float) -> ClockState:
    return guard.look(monotonic_s=monotonic_s, unix_s=1.7e9 + monotonic_s + offset_s)


@pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S, 3601.0, -3601.0])
def test_guard_skips_a_pass_and_then_waits_when_the_clock_jumps(jump_s: float) -> None:
    guard = ClockGuard()
    assert look(guard, 0.0, 0.0) is ClockState.EVEN
    assert look(guard, 10.0, jump_s) is ClockState.JUMPED
    assert look(guard, 11.0, jump_s) is ClockState.SETTLING
    assert look(guard, 10.0 + STABLE_AFTER_S, jump_s) is ClockState.EVEN
    assert guard.jumps == 1
    assert guard.last_jump_s == pytest.approx(jump_s)


def test_guard_waits_anew_when_the_clock_jumps_back() -> None:
    guard = ClockGuard()
    look(guard, 0.0, 0.0)
    assert look(guard, 10.0, 5 * DAY_S) is ClockState.JUMPED
    assert look(guard, 50.0, 0.0) is ClockState.JUMPED
    assert look(guard, 75.0, 0.0) is ClockState.SETTLING
    assert look(guard, 50.0 + STABLE_AFTER_S, 0.0) is ClockState.EVEN


def test_guard_takes_corrections_and_long_passes_for_granted() -> None:
    guard = ClockGuard()
    for step in range(100):
        assert look(guard, step * 3000.0, step * 20.0) is ClockState.EVEN
