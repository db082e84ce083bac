"""What a request must compute, whatever happens beside it: the same request in an engine alone."""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from engine.model_runner import Part, WaitForSection, wait_for_nothing
from engine.sampling import FloatArray
from engine.sequence import Sequence
from engine.window_record import WindowRecord
from kvstore.key import KeyChain
from kvstore.layout import BLOCK_TOKENS
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import Answer, EngineBench, MakeRunner, request_of


@dataclass(frozen=True, slots=True)
class Place:
    """Behind the first `end` tokens of a request, with a replay at `replay_first` or without."""

    request_id: str
    end: int
    replay_first: int | None


Bits = dict[Place, bytes]
"""Logits."""


@dataclass(frozen=True, eq=False)
class Alone:
    """A request that had an engine to itself."""

    token_ids: list[int]
    bits: dict[int, bytes]
    """Logits behind so many tokens."""
    kept: Kept
    """All blocks, and window state wherever it was copied."""


def record(one: EngineBench, on_part: list[Sequence] | None = None) -> Bits:
    """Whatever the engine computes from now on; what it computes again has the same bits.

    Sequences are appended to `on_part` after each pass.
    """
    found: Bits = {}
    compute = one.runner.compute

    def recording(
        parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        rows = compute(parts, wait_for_section=wait_for_section)
        for part, logits in zip(parts, rows, strict=True):
            sequence = part.sequence
            if logits is not None:
                place = Place(sequence.request.request_id, part.end, sequence.replay_first)
                assert found.setdefault(place, logits.tobytes()) == logits.tobytes(), place
            if on_part is not None:
                on_part.append(sequence)
        return rows

    one.runner.compute = recording  # type: ignore[method-assign]
    return found


def record_windows(one: EngineBench) -> dict[int, bytes]:
    """Window state of the one sequence there is, wherever it is copied from now on."""
    found: dict[int, bytes] = {}
    copy_window = one.runner.copy_window

    def recording(sequence: Sequence, anchor: int) -> WindowRecord:
        record = copy_window(sequence, anchor)
        found[anchor] = record.memory.numpy().tobytes()
        return record

    one.runner.copy_window = recording  # type: ignore[method-assign]
    return found


@cache
def alone(
    make_runner: MakeRunner,
    prompt_ids: tuple[int, ...],
    max_tokens: int,
    answered_ids: tuple[int, ...] = (),
    replay_first: int | None = None,
) -> Alone:
    """`replay_first`: the store has as much as such a replay needs, and no window state."""
    kept = Kept()
    if replay_first is not None:
        blocks = list(alone(make_runner, prompt_ids, max_tokens).kept.blocks.items())
        kept.blocks |= blocks[: replay_first // BLOCK_TOKENS + 1]
    one = EngineBench(
        make_runner, pool_blocks=16, state_slots=1, kept=kept, has_source=replay_first is not None
    )
    found, windows = record(one), record_windows(one)
    request = request_of(
        "r", prompt_ids, max_tokens, answered_ids=answered_ids, replay_first=replay_first
    )
    one.add(request)
    one.finish()
    assert one.engine.close()
    assert {place.replay_first for place in found} == {replay_first}
    bits = {place.end: logits for place, logits in found.items()}
    keys = KeyChain(one.runner.namespace).append([*prompt_ids, *one.tokens("r")])
    kept.windows |= {keys[at // BLOCK_TOKENS - 1]: record for at, record in windows.items()}
    return Alone(one.tokens("r"), bits, kept)


def check_answer(
    make_runner: MakeRunner, prompt_ids: tuple[int, ...], answer: Answer, bits: Bits, longest: int
) -> None:
    """Tokens and logits of an answer are those of the same request alone, with the same replay.

    One that went on without the replay that it had begun with is a request of its own from there.
    `bits` are those of the request.
    """
    at = len(answer.token_ids) - len(answer.replays)
    expected: dict[int | None, Alone] = {}
    for replay_first, given in groupby(answer.replays):
        assert replay_first not in expected, "a replay that is begun again after a cold run"
        answered_ids = tuple(answer.token_ids[:at])
        is_plain = at == 0 or answered_ids == tuple(
            alone(make_runner, prompt_ids, longest, (), replay_first).token_ids[:at]
        )
        one = alone(
            make_runner, prompt_ids, longest, () if is_plain else answered_ids, replay_first
        )
        end = at + len(list(given))
        assert answer.token_ids[at:end] == one.token_ids[at:end], (at, end, replay_first)
        expected[replay_first] = one
        at = end
    for place, logits in bits.items():
        assert expected[place.replay_first].bits[place.end] == logits, place


class SoundKept(Kept):
    """Takes what a cold run saves, in bytes that are known, and nothing else.

    So what is loaded is sound, and everything that is computed behind it is known too.
    """

    def __init__(self, cold_runs: Run[Kept]) -> None:
        super().__init__()
        self.sound = Kept()
        self.strange: set[bytes] = set()
        """Keys of what came with other bytes, or is of another answer."""
        for kept in cold_runs:
            self.sound.blocks |= kept.blocks
            self.sound.windows |= kept.windows

    def put_block(self, key: bytes, data: bytes, *, is_dense: bool) -> bool:
        is_new = key not in self.blocks
        self._put(self.blocks, self.sound.blocks, key, data)
        return is_new

    def put_window(self, key: bytes, record: bytes) -> None:
        self._put(self.windows, self.sound.windows, key, record)

    def _put(
        self, into: dict[bytes, bytes], sound: dict[bytes, bytes], key: bytes, data: bytes
    ) -> None:
        if sound.get(key) == data:
            into[key] = data
        else:
            self.strange.add(key)


def strange_keys(one: EngineBench, sequence: Sequence, plain_ids: list[int]) -> list[bytes]:
    """Keys of blocks that a cold run of its prompt, which answers `plain_ids`, would not save with
    the same bytes."""
    first = len(sequence.token_ids) // BLOCK_TOKENS
    answer_ids = sequence.answer_ids
    if answer_ids != plain_ids[: len(answer_ids)]:
        first = sequence.prompt_tokens // BLOCK_TOKENS
    if sequence.replay_first is not None:
        first = sequence.replay_first // BLOCK_TOKENS + 1
    return KeyChain(one.runner.namespace).append(sequence.token_ids)[first:]
