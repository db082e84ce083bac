"""A signal ends the demo once, and waits where something must be whole."""

import os
import signal

import pytest

from demo.interruption import SIGNALS, Interruption


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_interrupts_and_is_remembered(number: int) -> None:
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert interruption.exit_code == 128 + number


def test_later_signals_do_not_disturb_the_cleaning_up() -> None:
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with interruption.held():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.number == signal.SIGINT


def test_signal_waits_until_the_held_block_has_ended() -> None:
    steps = []

    def work(interruption: Interruption) -> None:
        with interruption.held():
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("held block went on")
        steps.append("never reached")

    with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
        work(interruption)
    assert steps == ["held block went on"]


def test_error_in_a_held_block_is_not_hidden_by_the_signal() -> None:
    def work(interruption: Interruption) -> None:
        with interruption.held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("no room")

    with Interruption() as interruption, pytest.raises(OSError, match="no room"):
        work(interruption)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interruption():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
