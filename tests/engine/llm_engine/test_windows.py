"""Which window states are kept, by the rules of hits."""

import logging
from itertools import pairwise
from typing import NoReturn

import pytest
import torch

from engine.models.deepseek_v41.state import SequenceState
from kvstore.key import KeyChain
from tests.engine.llm_engine.engine_bench import bench, llama, nano, prompt_of, request_of


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "anchors"),
    [
        (100, 2, []),
        (128, 2, [128]),
        (129, 2, [128]),
        (300, 2, [256]),
        (250, 8, [128, 256]),
        (255, 2, [128, 256]),
        (380, 5, [256, 384]),
    ],
)
def test_window_is_saved_before_the_last_chunk_and_where_the_answer_fills_a_block(
    prompt_tokens: int, max_tokens: int, anchors: list[int]
) -> None:
    prompt = prompt_of(prompt_tokens)
    with bench(nano) as one:
        one.add(request_of("r", prompt, max_tokens))
        one.finish()
        keys = KeyChain(one.runner.namespace).append([*prompt, *one.tokens("r")])
        found = [128 * (keys.index(key) + 1) for key in one.kept.windows]
        assert sorted(found) == anchors


def test_windows_of_an_answer_are_saved_at_its_end_and_only_the_newest_two() -> None:
    prompt, answered = prompt_of(127), tuple(prompt_of(255, 1))
    with bench(nano) as one:
        one.add(request_of("r", prompt, 300, answered_ids=answered))
        one.step_until(lambda: len(one.tokens("r")) == 259)
        # The answer fills blocks at 128 and 256, as it is begun anew, and at 384.
        assert one.sink.windows_saved == 0
        one.engine.abort("r")
        one.finish()
        keys = KeyChain(one.runner.namespace).append([*prompt, *one.tokens("r")])
        assert list(one.kept.windows) == keys[1:3]


def test_device_without_memory_for_window_state_costs_later_hits_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: SequenceState, position: int) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nand advice")

    prompt = prompt_of(250)
    with bench(nano) as one:
        one.add(request_of("kept", prompt, 8))
        one.finish()
        expected, kept = one.tokens("kept"), dict(one.kept.windows)
        one.kept.windows.clear()
    with bench(nano) as one:
        monkeypatch.setattr(SequenceState, "copy_stored_window", fail)
        one.add(request_of("r", prompt, 8))
        one.finish()
        assert one.tokens("r") == expected
        assert one.kept.windows == {}
        assert one.engine.status.dropped_windows == len(kept) == 2
    (told,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert told.endswith("window state: CUDA out of memory. Tried to allocate 2 MiB.")


def test_dense_model_keeps_no_windows() -> None:
    with bench(llama) as one:
        one.add(request_of("r", prompt_of(300), 100))
        one.finish()
        assert one.sink.windows_saved == 0


def test_every_turn_of_a_conversation_is_an_exact_hit() -> None:
    prompt = prompt_of(150)
    hits = []
    with bench(nano) as one:
        for turn in range(3):
            name = f"turn {turn}"
            one.add(request_of(name, prompt, 12))
            one.finish()
            report = one.report(name)
            assert report.replay_tokens == 0
            hits.append(report.hit_tokens)
            prompt = [*prompt, *one.tokens(name), *prompt_of(120, turn)]
    assert hits[0] == 0
    assert all(later > earlier for earlier, later in pairwise(hits))
