"""One model with its memory and, if there is one, its block store: prompt in, answer out.

    match -> plan -> fetch into the pool -> prefill the rest -> first token -> decode ... -> answer
                                                                    |            |
                                                                    +-> complete blocks -> saver

Serves one request at a time, from one thread. A store that fails or is slow costs a request its
hit and at most a moment (the deadlines of EngineConfig), never its answer; unless a save that hangs
holds so many blocks that the pool cannot take the request, which then raises BlockPoolExhausted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvstore.key import KeyChain, Namespace
from kvstore.layout import BLOCK_TOKENS

from .block_pool import BlockPool
from .block_store import BlockStore
from .errors import BlockPoolExhausted, EngineClosed, InvalidRequest
from .generation import FinishReason, Generation, Timings
from .models.llama import LlamaModel
from .prefix import PrefixHit, PrefixReader
from .runner import Runner
from .sampling import GREEDY, Sampling, choose_token
from .saver import BlockSaver, SaveJob, SaveReceipt
from .store_faults import StoreFaults
from .token_sequence import TokenSequence
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine that do not change what it answers."""

    pool_blocks: int = 128
    """Blocks of KV cache in memory; a request needs one for each 128 tokens of prompt + answer."""

    save_queue_blocks: int = 64
    """Blocks that may wait to be saved before the oldest are dropped."""

    fetch_deadline_s: float = 2.0
    """Longest time a request waits for blocks; what came by then is used."""

    room_deadline_s: float = 1.0
    """Longest time a request waits for saves where the pool is short of blocks; after that the
    oldest ones that have not begun are dropped."""

    close_deadline_s: float = 10.0
    """Longest time `close` waits for blocks that are still to be saved."""

    ttl_class: str = "chat"
    """Class of traffic that the store keeps the blocks under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    text: str
    finish_reason: FinishReason
    first_token_s: float
    """Clock time at which the first token was known."""


class LLM:
    """A model that answers. Close it, or use it as a context manager, so that saves are finished.

    `clock` gives seconds and never goes back. `store_faults.count` is the number of store calls
    that raised an error.
    """

    def __init__(
        self,
        *,
        model: LlamaModel,
        tokenizer: Tokenizer,
        namespace: Namespace,
        store: BlockStore | None,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self.tokenizer = tokenizer
        self.namespace = namespace
        self.context_tokens = model.config.context_tokens
        self.compute = str(model.compute_dtype).removeprefix("torch.")
        self.store_faults = StoreFaults()
        self.pool = BlockPool(
            block_bytes=model.geometry.block_bytes, capacity_blocks=config.pool_blocks
        )
        self.runner = Runner(model, self.pool)
        self._config = config
        self._clock = clock
        self._is_closed = False
        self._prefix_reader: PrefixReader | None = None
        self._saver: BlockSaver | None = None
        if store is not None:
            self._prefix_reader = PrefixReader(
                store,
                namespace=namespace,
                pool=self.pool,
                faults=self.store_faults,
                fetch_deadline_s=config.fetch_deadline_s,
                clock=clock,
            )
            self._saver = BlockSaver(
                store,
                namespace=namespace,
                pool=self.pool,
                faults=self.store_faults,
                queue_blocks=config.save_queue_blocks,
                ttl_class=config.ttl_class,
                clock=clock,
            )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def flush(self, deadline_s: float) -> bool:
        """Wait for saves; False if some were still under way after `deadline_s`."""
        return self._saver.flush(deadline_s) if self._saver else True

    def close(self) -> bool:
        """End the engine; False if blocks could not be saved within `close_deadline_s`.

        The store stays open: it belongs to the caller. May be called again.
        """
        self._is_closed = True
        return self._saver.close(self._config.close_deadline_s) if self._saver else True

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Generation:
        """Answer a prompt with at most `max_tokens` tokens; fewer if the context ends before.

        `on_text` gets the text as it comes, in pieces that joined are `text`; if it raises, the
        request ends. Raises InvalidRequest for a prompt that is empty, holds ids the model has
        not, or fills the whole context; BlockPoolExhausted if the pool is too small for it.
        """
        self._check(prompt_ids, max_tokens)
        start_s = self._clock()
        tokens_max = min(len(prompt_ids) + max_tokens, self.context_tokens)
        block_ids = self._allocate(-(-tokens_max // BLOCK_TOKENS))
        try:
            chain = KeyChain(self.namespace)
            hit = self._read_prefix(chain.append(prompt_ids), block_ids, len(prompt_ids))
            sequence = TokenSequence(
                token_ids=list(prompt_ids), block_ids=block_ids, hit_tokens=hit.hit_tokens
            )
            prefill_start_s = self._clock()
            logits = self.runner.prefill(sequence)
            prefill_s = self._clock() - prefill_start_s
            saves = _CompleteBlocks(self._saver, sequence, chain)
            answer = self._decode(sequence, logits, tokens_max, sampling, on_text, saves)
        finally:
            self.pool.release(block_ids)
        return Generation(
            prompt_ids=list(prompt_ids),
            token_ids=sequence.token_ids[len(prompt_ids) :],
            text=answer.text,
            finish_reason=answer.finish_reason,
            timings=Timings(
                match_s=hit.match_s,
                fetch_s=hit.fetch_s,
                prefill_s=prefill_s,
                ttft_s=answer.first_token_s - start_s,
                decode_s=self._clock() - answer.first_token_s,
            ),
            matched_tokens=hit.matched_blocks * BLOCK_TOKENS,
            hit_tokens=hit.hit_tokens,
            rejected_shards=hit.rejected_shards,
            receipt=saves.receipt,
        )

    def _check(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        if self._is_closed:
            raise EngineClosed("generate")
        if not 0 < len(prompt_ids) < self.context_tokens:
            raise InvalidRequest(
                "prompt tokens",
                given=len(prompt_ids),
                expected=f"1 to {self.context_tokens - 1} (the model's context less one)",
            )
        if max_tokens < 1:
            raise InvalidRequest("max_tokens", given=max_tokens, expected="1 or more")
        strange = [i for i in prompt_ids if not 0 <= i < self.tokenizer.vocabulary]
        if strange:
            raise InvalidRequest(
                "token id", given=strange[0], expected=f"0 to {self.tokenizer.vocabulary - 1}"
            )

    def _allocate(self, blocks: int) -> list[int]:
        try:
            return self.pool.allocate(blocks)
        except BlockPoolExhausted:
            if self._saver is None or blocks > self.pool.capacity_blocks:
                raise
        # An answer now is worth more than a hit later: what is not saved by then is given up.
        self._saver.make_room(blocks, self._config.room_deadline_s)
        return self.pool.allocate(blocks)

    def _read_prefix(
        self, keys: list[bytes], block_ids: list[int], prompt_tokens: int
    ) -> PrefixHit:
        if self._prefix_reader is None:
            return PrefixHit()
        return self._prefix_reader.read(keys, block_ids, prompt_tokens=prompt_tokens)

    def _decode(
        self,
        sequence: TokenSequence,
        logits: torch.Tensor,
        tokens_max: int,
        sampling: Sampling,
        on_text: Callable[[str], None],
        saves: "_CompleteBlocks",
    ) -> _Answer:
        """Append tokens until a stop token or `tokens_max`; complete blocks go to be saved."""
        stream = self.tokenizer.text_stream()
        pieces = []
        first_token_s: float | None = None
        finish_reason: FinishReason | None = None
        while finish_reason is None:
            token_id = choose_token(logits.numpy(), sampling, len(sequence.token_ids))
            sequence.token_ids.append(token_id)
            if first_token_s is None:
                first_token_s = self._clock()
            if token_id in self.tokenizer.stop_ids:
                finish_reason = "stop"
            elif len(sequence.token_ids) == tokens_max:
                finish_reason = "length"
            piece = stream.push(token_id) + ("" if finish_reason is None else stream.finish())
            if piece:
                pieces.append(piece)
                on_text(piece)
            # After the text is out: handing over blocks must not delay the first token.
            saves.submit()
            if finish_reason is None or len(sequence.token_ids) % BLOCK_TOKENS == 0:
                # The second case fills the last block, so that a follow-up finds it.
                logits = self.runner.step(sequence)
        saves.submit()
        assert first_token_s is not None
        return _Answer(
            text="".join(pieces), finish_reason=finish_reason, first_token_s=first_token_s
        )


class _CompleteBlocks:
    """Hands the blocks of one sequence to the saver as they become complete, each once."""

    def __init__(self, saver: BlockSaver | None, sequence: TokenSequence, chain: KeyChain) -> None:
        self.receipt = SaveReceipt()
        self._saver = saver
        self._sequence = sequence
        self._chain = chain
        self._submitted_blocks = sequence.hit_tokens // BLOCK_TOKENS

    def submit(self) -> None:
        complete_blocks = self._sequence.complete_blocks
        if self._saver is None or complete_blocks == self._submitted_blocks:
            return
        chain, sequence = self._chain, self._sequence
        chain.append(sequence.token_ids[chain.token_count : complete_blocks * BLOCK_TOKENS])
        self._saver.submit(
            SaveJob(
                keys=chain.keys[:complete_blocks],
                block_ids=sequence.block_ids[self._submitted_blocks : complete_blocks],
                receipt=self.receipt,
            )
        )
        self._submitted_blocks = complete_blocks
