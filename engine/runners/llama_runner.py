"""Runs a llama model over sequences such that equal tokens always give equal bits.

Matrix kernels sum in an order that depends on the number of rows, so a token's K and V depend on
how many tokens were run together with it. Three rules take the choice away:

1. A complete block is always computed as one piece of 128 tokens.
2. In the open block the prompt's part is one piece, and each token of the answer one of its own.
3. A token that completes a block has the whole block run again as such a piece.

So the bytes of every complete block are a function of the weights and the tokens alone, whether
they were part of a prompt or of an answer, computed here or fetched; and a sequence that was given
up and begun anew leaves the logits and the open block that it had. docs/decisions/0007 has the
numbers, 0030 the whole statement.
"""

from collections.abc import Sequence as Run

import torch

from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS, BlockLayout
from kvstore.policy import MISS, HitPlan

from ..block_pool import BlockPool
from ..errors import HandoverRefused
from ..model_runner import Buffer, Part, WaitForSection, Window, wait_for_nothing
from ..models.llama import LlamaModel
from ..paged_kv import GatherBuffer, PagedKV, open_block_of
from ..sampling import FloatArray
from ..sequence import Sequence
from ..window_record import WindowRecord
from .marks import read_marks, write_marks
from .section_gate import SectionGate


def plan_pieces(first: int, end: int, prompt_tokens: int) -> list[tuple[int, int]]:
    """Pieces (first, end) by which the tokens first .. end - 1 are run, by the rules above.

    `first` is where the last call ended: a block border, or behind the prompt. `end` is a block
    border, or the prompt's end, or behind it.
    """
    assert first < end, (first, end)
    assert first % BLOCK_TOKENS == 0 or first >= prompt_tokens, (first, prompt_tokens)
    assert end % BLOCK_TOKENS == 0 or end >= prompt_tokens, (end, prompt_tokens)
    open_first = end - end % BLOCK_TOKENS
    begin = first - first % BLOCK_TOKENS
    pieces = [(block, block + BLOCK_TOKENS) for block in range(begin, open_first, BLOCK_TOKENS)]
    position = max(first, open_first)
    if position < min(prompt_tokens, end):
        pieces.append((position, prompt_tokens))
        position = prompt_tokens
    return pieces + [(token, token + 1) for token in range(position, end)]


class LlamaRunner:
    """A dense model as a `ModelRunner`: all that it keeps of a sequence is in blocks."""

    window_layout: BlockLayout | None = None
    state_layout: BlockLayout | None = None

    def __init__(self, model: LlamaModel, pool: BlockPool, namespace: Namespace) -> None:
        self.pool = pool
        self.namespace = namespace
        self.context_tokens = model.config.context_tokens
        self.vocabulary = model.config.vocabulary
        self._model = model
        blocks_max = -(-model.config.context_tokens // BLOCK_TOKENS)
        self._gather_buffer = GatherBuffer(model.geometry, blocks_max=blocks_max)

    @property
    def free_states(self) -> int:
        """No bound beside the blocks, of which a sequence has one at least."""
        return self.pool.capacity_blocks

    def open(self, sequence: Sequence) -> None:
        sequence.computed_tokens = 0
        sequence.hit = MISS

    def close(self, sequence: Sequence) -> None:
        """There is nothing to take back."""

    def start_after(self, sequence: Sequence, plan: HitPlan, window: Window | None) -> None:
        assert sequence.computed_tokens == 0, sequence.computed_tokens
        assert plan.replay_tokens == 0, plan
        assert window is None, "a dense model has no windows"
        assert plan.hit_tokens < len(sequence.token_ids), "no token is left to compute logits from"
        sequence.hit = plan
        sequence.computed_tokens = plan.hit_tokens

    def chunk_borders(self, sequence: Sequence) -> list[int]:
        return []

    @torch.inference_mode()
    def compute(
        self, parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        gate = SectionGate(wait_for_section)
        return [self._compute(part, gate) for part in parts]

    def _compute(self, part: Part, gate: SectionGate) -> FloatArray | None:
        sequence = part.sequence
        kv = PagedKV(self.pool, sequence.block_ids, self._gather_buffer)
        for first, end in plan_pieces(sequence.computed_tokens, part.end, sequence.prompt_tokens):
            token_ids_T = torch.tensor(sequence.token_ids[first:end])
            hidden_E = self._model.forward(token_ids_T, kv, first, gate.pass_section)
            sequence.computed_tokens = end
        if part.end < len(sequence.token_ids):
            return None
        logits: FloatArray = self._model.logits(hidden_E).numpy()
        return logits

    def window_anchor(self, sequence: Sequence) -> int | None:
        return None

    def copy_window(self, sequence: Sequence, anchor: int) -> WindowRecord:
        raise AssertionError("a dense model has no windows")

    def pack_state(self, sequence: Sequence, into: memoryview | None) -> bytes:
        assert into is None, "a dense model has nothing beside its blocks"
        return write_marks(sequence)

    def unpack_state(self, sequence: Sequence, marks: bytes, state: Buffer | None) -> None:
        computed_tokens, hit, rest = read_marks(marks, sequence)
        if len(rest) or hit.replay_tokens or hit.window_anchor is not None or state is not None:
            raise HandoverRefused("marks", given="a state with windows", expected="a dense model's")
        sequence.hit = hit
        sequence.computed_tokens = computed_tokens

    def open_block_bytes(self, sequence: Sequence) -> bytes:
        block, tokens = divmod(sequence.computed_tokens, BLOCK_TOKENS)
        if tokens == 0:
            return b""
        block_id = sequence.block_ids[block]
        return open_block_of(self.pool, self._model.geometry, block_id, tokens)
