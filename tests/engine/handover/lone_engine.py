"""The least that can hand over: a runner that is driven one sequence at a time, without a schedule.

It is a `ReceivingEngine`, as `LLMEngine` is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from engine.block_pool import BlockPool
from engine.errors import BlockPoolExhausted, StateSlotsExhausted
from engine.model_runner import ModelRunner, Part
from engine.models.deepseek_v41.build_weights import build_weights
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.model import DeepseekV41
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from engine.models.deepseek_v41.weights import ModelWeights
from engine.request import Request
from engine.request_checks import PreparedRequest
from engine.runners.v41_runner import V41Runner
from engine.sampling import FloatArray, choose_token
from engine.sequence import Sequence
from kvstore.key import KeyChain, Namespace
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import HitPlan

NANO = shipped_config("v41-nano")


@cache
def nano_weights() -> ModelWeights:
    return build_weights(NANO, random_tensors(NANO, torch.Generator().manual_seed(5)))


def nano_runner(*, pool_blocks: int, slots: int, fill: int) -> V41Runner:
    """v41-nano with random weights, the same in every runner."""
    assert NANO.engram is not None
    layout = block_layout(NANO)
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=pool_blocks)
    pool.memory.fill_(fill)
    states = StatePool(NANO, slots)
    states.memory.fill_(fill)
    ids = torch.arange(NANO.vocabulary) % NANO.engram.compressed_vocabulary
    return V41Runner(
        DeepseekV41(NANO, nano_weights(), compressed_ids_V=ids, pool=pool),
        pool=pool,
        states=states,
        namespace=Namespace(model="nano", weights="5", tokenizer="none", layout=layout),
    )


@dataclass(eq=False)
class LoneEngine:
    """`free()` of an engine that nothing has leaked from is what it was at first."""

    runner: ModelRunner
    attached: list[Sequence] = field(default_factory=list)

    def free(self) -> tuple[int, int]:
        return self.runner.pool.free_blocks, self.runner.free_states

    # What the receiver asks ---------------------------------------------------------------------

    def open_for_handover(self, asked: PreparedRequest, /) -> Sequence | None:
        return self._open(asked.request)

    def _open(self, request: Request) -> Sequence | None:
        sequence = Sequence(request)
        try:
            sequence.block_ids = self.runner.pool.allocate(-(-len(sequence.token_ids) // 128))
        except BlockPoolExhausted:
            return None
        try:
            self.runner.open(sequence)
        except StateSlotsExhausted:
            self.runner.pool.release(sequence.block_ids)
            return None
        return sequence

    def attach(self, sequence: Sequence, chain: KeyChain, /) -> None:
        assert len(chain.keys) == len(sequence.token_ids) // BLOCK_TOKENS
        self.attached.append(sequence)

    def release(self, sequence: Sequence) -> None:
        self.runner.close(sequence)
        self.runner.pool.release(sequence.block_ids)
        sequence.block_ids = []

    # Work ---------------------------------------------------------------------------------------

    def open(self, request: Request) -> Sequence:
        sequence = self._open(request)
        assert sequence is not None
        return sequence

    def prefill_until_last(self, sequence: Sequence) -> None:
        """All passes over the known tokens but the last one."""
        for end in range(BLOCK_TOKENS, len(sequence.token_ids), BLOCK_TOKENS):
            if end > sequence.computed_tokens:
                self.runner.compute([Part(sequence, end)])

    def step(self, sequence: Sequence) -> None:
        """Compute the tokens that are known and choose the next one."""
        (logits,) = self.runner.compute([Part(sequence, len(sequence.token_ids))])
        assert logits is not None
        self.append(sequence, logits)

    def append(self, sequence: Sequence, logits: FloatArray) -> None:
        position = len(sequence.token_ids)
        sequence.token_ids.append(choose_token(logits, sequence.request.sampling, position))
        missing = -(-len(sequence.token_ids) // BLOCK_TOKENS) - len(sequence.block_ids)
        sequence.block_ids += self.runner.pool.allocate(max(missing, 0))

    def answer(self, request: Request, tokens: int) -> Sequence:
        """The sequence with so many tokens of the answer, the last one not computed."""
        sequence = self.open(request)
        self.prefill_until_last(sequence)
        for _ in range(tokens):
            self.step(sequence)
        return sequence

    def start_after(
        self, sequence: Sequence, plan: HitPlan, source: LoneEngine, of: Sequence
    ) -> None:
        """Begin behind a replayed hit whose blocks another engine's sequence has."""
        for block in range(plan.stored_blocks):
            own = self.runner.pool.buffer(sequence.block_ids[block])
            own[:] = source.runner.pool.buffer(of.block_ids[block])
        self.runner.start_after(sequence, plan, None)

    def contents(self, sequence: Sequence) -> tuple[list[bytes], bytes, bytes, bytes]:
        """Complete blocks, the open one, state and marks: everything that a sequence is."""
        pool, layout = self.runner.pool, self.runner.state_layout
        complete = sequence.block_ids[: sequence.complete_blocks]
        state = bytearray(layout.block_bytes) if layout else bytearray()
        marks = self.runner.pack_state(sequence, memoryview(state) if layout else None)
        blocks = [bytes(pool.buffer(block_id)) for block_id in complete]
        return blocks, self.runner.open_block_bytes(sequence), bytes(state), marks


OpenEngine = Callable[..., LoneEngine]
