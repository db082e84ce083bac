"""A runner of either family over pools that others have used, and sequences taken through it."""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.load import ComputeType, load_runner
from engine.model_runner import ModelRunner, Part
from engine.models.deepseek_v41.build_weights import build_weights
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.load import LoadedModel
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from engine.request import Request
from engine.runners.v41_runner import V41Runner
from engine.sampling import FloatArray
from engine.sequence import Sequence
from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import MISS, HitPlan
from tests.engine.tiny_model import TinyModel

BLOCKS = 16
SLOTS = 4
FILL = 0xFE
"""NaN in every format of the caches: what is read of it shows."""


@dataclass(frozen=True)
class State:
    """A sequence as another engine can take it over, and the bits that it must go on with."""

    marks: bytes
    slot: bytes | None
    complete: list[bytes]
    open_block: bytes


@dataclass(eq=False)
class RunnerBench:
    runner: ModelRunner

    def __post_init__(self) -> None:
        self.runner.pool.memory.fill_(FILL)

    def tokens(self, count: int, seed: int = 1) -> list[int]:
        """Token ids of a text that is always the same."""
        rng = Random(seed)
        return [rng.randrange(self.runner.vocabulary) for _ in range(count)]

    def begin(
        self, prompt_ids: Run[int], answered_ids: Run[int] = (), *, room_tokens: int = 0
    ) -> Sequence:
        """An open sequence, with blocks for its tokens and `room_tokens` more."""
        request = Request(
            request_id="r",
            prompt_ids=list(prompt_ids),
            max_tokens=1000,
            answered_ids=tuple(answered_ids),
        )
        sequence = Sequence(request)
        tokens = len(sequence.token_ids) + room_tokens
        sequence.block_ids = self.runner.pool.allocate(-(-tokens // BLOCK_TOKENS))
        # As blocks lie in a pool that has been in use for a while: in no order.
        sequence.block_ids.reverse()
        self.runner.open(sequence)
        return sequence

    def end(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.runner.close(sequence)
            self.runner.pool.release(sequence.block_ids)

    def run(self, sequence: Sequence, ends: Run[int] = ()) -> FloatArray:
        """Compute all that is known, in passes that end at `ends`; the last token's logits."""
        for end in [*ends, len(sequence.token_ids)]:
            if end > sequence.computed_tokens:
                (logits,) = self.runner.compute([Part(sequence, end)])
        assert logits is not None
        return logits

    def run_to(self, sequence: Sequence, end: int) -> None:
        """Compute the tokens before `end`."""
        self.runner.compute([Part(sequence, end)])

    def append(self, sequence: Sequence, token_ids: Run[int]) -> list[FloatArray]:
        """Decode the given tokens one by one."""
        found = []
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            found.append(self.run(sequence))
        return found

    def complete_blocks(self, sequence: Sequence) -> list[bytes]:
        block_ids = sequence.block_ids[: sequence.complete_blocks]
        return [bytes(self.runner.pool.buffer(block_id)) for block_id in block_ids]

    def fill_blocks(self, sequence: Sequence, stored: Run[bytes]) -> None:
        for block_id, data in zip(sequence.block_ids, stored, strict=False):
            self.runner.pool.buffer(block_id)[:] = data

    def begin_hit(
        self, prompt_ids: Run[int], stored: Run[bytes], plan: HitPlan, window: bytes | None = None
    ) -> Sequence:
        """A sequence behind a hit whose blocks are all there."""
        sequence = self.begin(prompt_ids)
        self.fill_blocks(sequence, stored[: plan.stored_blocks])
        if plan != MISS:
            self.runner.start_after(sequence, plan, window)
        return sequence

    def exact_hit(self, hit_tokens: int) -> HitPlan:
        """A hit that leaves the bits as they are."""
        has_windows = self.runner.window_layout is not None
        return HitPlan(hit_tokens, 0, hit_tokens if has_windows else None)

    def pack(self, sequence: Sequence) -> State:
        layout = self.runner.state_layout
        slot = None if layout is None else bytearray(layout.block_bytes)
        marks = self.runner.pack_state(sequence, None if slot is None else memoryview(slot))
        return State(
            marks=marks,
            slot=None if slot is None else bytes(slot),
            complete=self.complete_blocks(sequence),
            open_block=self.runner.open_block_bytes(sequence),
        )

    def unpack(self, state: State, like: Sequence, *, room_tokens: int = 0) -> Sequence:
        """A sequence with the tokens of `like` that goes on where `state` was taken."""
        request = like.request
        answered = like.token_ids[like.prompt_tokens :]
        sequence = self.begin(request.prompt_ids, answered, room_tokens=room_tokens)
        blocks = [*state.complete, state.open_block] if state.open_block else state.complete
        self.fill_blocks(sequence, blocks)
        self.runner.unpack_state(sequence, state.marks, state.slot)
        return sequence

    def check_same_state(self, one: Sequence, other: Sequence) -> None:
        """Blocks and state, without the marks: two ways may have led there."""
        found, expected = self.pack(one), self.pack(other)
        assert found.complete == expected.complete
        assert found.open_block == expected.open_block
        assert found.slot == expected.slot

    def window_if_any(self, sequence: Sequence, anchor: int) -> bytes | None:
        """The window state, None of a dense model."""
        return self.window(sequence, anchor) if self.runner.window_layout else None

    def window(self, sequence: Sequence, anchor: int) -> bytes:
        record = self.runner.copy_window(sequence, anchor).memory.numpy()
        assert self.runner.window_layout is not None
        assert record.nbytes == self.runner.window_layout.block_bytes
        return record.tobytes()


def same_bits(one: FloatArray, other: FloatArray) -> bool:
    """Equal floats of which all are numbers."""
    assert np.isfinite(one).all()
    return bool(np.array_equal(one, other))


@cache
def nano_config() -> DeepseekV41Config:
    """The shipped nano model, with the released one's window."""
    return replace(shipped_config("v41-nano"), window=128)


@cache
def nano_model() -> LoadedModel:
    config = nano_config()
    tensors = random_tensors(config, torch.Generator().manual_seed(5))
    assert config.engram is not None
    ids = torch.arange(config.vocabulary) % config.engram.compressed_vocabulary
    return LoadedModel(config, build_weights(config, tensors), ids)


def v41_bench(**options: int) -> RunnerBench:
    config = nano_config()
    layout = block_layout(config)
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=BLOCKS)
    states = StatePool(config, SLOTS)
    states.memory.fill_(FILL)
    namespace = Namespace(model="nano", weights="random", tokenizer="none", layout=layout)
    runner = V41Runner(
        nano_model().build(pool), pool=pool, states=states, namespace=namespace, **options
    )
    return RunnerBench(runner)


def llama_bench(path: Path, compute: ComputeType) -> RunnerBench:
    loaded = load_runner(path, pool_blocks=BLOCKS, state_slots=SLOTS, compute=compute)
    return RunnerBench(loaded.runner)


def write_tiny(folder: Path) -> Path:
    return TinyModel().write(folder / "tiny.gguf")
