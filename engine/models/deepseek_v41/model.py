"""The forward pass: next tokens of some sequences in, logits out; caches and states grow.

It runs what it is given: which tokens, in which company, and which blocks they go to is decided
elsewhere. The bits of a token's cache and logits depend on its sequence alone, not on how the
sequence was cut into passes nor on what ran beside it (docs/decisions/0028).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.operations import Operations
from kernels.reference.rope import rope_frequencies

from ...block_pool import BlockPool
from ...upload import upload
from .attention import Attention
from .block_cache import BlockCache
from .compression import EntryRows, EntryWriter, plan_entries
from .config import DeepseekV41Config, LayerRole, plan_layers
from .draft_context import DraftContext
from .engram import Engram
from .feed_forward import FeedForward
from .layout import group_tokens
from .observing import Observer, ignore
from .residual import Residual, ResidualMixer, begin_residual, mean_of_streams
from .rows import (
    Chunk,
    ImageRows,
    RopeFrequencies,
    RowBatch,
    keep_tails,
    plan_rows,
    see_windows,
)
from .selection import EntrySelector, Selection
from .state import recent_count
from .weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """For each chunk: `logits` float32 [n, V] and `hidden` [n, E] before the final norm.

    n is 1 for the last token, or every token that ran through the decoder half if all were asked
    for; 0 if none did.
    """

    logits: list[torch.Tensor]
    hidden: list[torch.Tensor]


class DeepseekV41:
    """A model in memory. Not for use by two threads at once."""

    def __init__(
        self,
        config: DeepseekV41Config,
        weights: ModelWeights,
        *,
        compressed_ids_V: torch.Tensor,
        pool: BlockPool,
        operations: Operations | None = None,
    ) -> None:
        """`compressed_ids_V`: Engram's id of each token, int [V] (engram_vocabulary).

        Weights and pool are on one device, where everything is computed.
        """
        operations = operations or Operations()
        device = weights.embedding.device
        assert pool.memory.device == device, (pool.memory.device, device)
        self.blocks = BlockCache(config, pool)
        self.config = config
        self.roles = plan_layers(config)
        self.weights = weights
        self.operations = operations
        self.frequencies = RopeFrequencies(
            window=rope_frequencies(config.rope_dim, config.rope_theta, None).to(device),
            compressed=rope_frequencies(
                config.rope_dim, config.compress_rope_theta, config.yarn
            ).to(device),
        )
        self.mixer = ResidualMixer(config, operations)
        self.feed_forward = FeedForward(config, operations)
        self._entries = EntryWriter(config, operations, self.blocks)
        self._entry_ratios = {role.ratio for role in self.roles if role.owns_kv}
        selector = EntrySelector(config, operations, self.blocks)
        self._attention = Attention(config, operations, self.blocks, selector)
        self._engram = Engram(config, operations, compressed_ids_V, device)
        self._draft_context = DraftContext(config, operations)

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        *,
        wants_all_logits: bool = False,
        observe: Observer = ignore,
        before_owner: Callable[[int], None] = lambda layer: None,
    ) -> ForwardResult:
        """Run the chunks' tokens and advance their states by them.

        A sequence is in one chunk at most. Its state's blocks must reach to the chunk's end. Before
        any of an owner layer's entries is read or written, `before_owner` is called with the layer:
        once for each, in order. If it raises, the states of the chunks are lost.
        """
        check_chunks(chunks, self.config)
        device = self.weights.embedding.device
        rows = plan_rows(chunks, self.frequencies, device, observe)
        token_ids = [torch.as_tensor(chunk.token_ids, dtype=torch.int64) for chunk in chunks]
        compressed_ids = self._engram.compress(chunks, token_ids)
        residual = begin_residual(
            self._embed(chunks, rows, upload(torch.cat(token_ids), device)), self.config.streams
        )
        looked_up = [upload(ids, device) for ids in compressed_ids]
        rows, residual = self._run_layers(chunks, rows, residual, looked_up, before_owner)
        result = self._logits(rows, residual, wants_all_logits)
        for chunk, ids in zip(chunks, compressed_ids, strict=True):
            chunk.state.advance(len(chunk.token_ids), ids)
        return result

    def recent_ids_of(self, token_ids: Sequence[int]) -> list[int]:
        """What a state that begins after `token_ids` (text only) must know of them."""
        return self._engram.ids_of(token_ids[-recent_count(self.config) :])

    def _embed(
        self, chunks: Sequence[Chunk], rows: RowBatch, token_ids_T: torch.Tensor
    ) -> torch.Tensor:
        embedding_TE = self.weights.embedding[token_ids_T].float()
        for chunk, span in zip(chunks, rows.spans, strict=True):
            if chunk.image is not None and chunk.image.embeddings is not None:
                # A view of the rows: what is written here is written there.
                embedding_TE[span.rows].masked_scatter_(
                    rows.is_image_T[span.rows, None], chunk.image.embeddings.to(embedding_TE)
                )
        return embedding_TE

    def _run_layers(
        self,
        chunks: Sequence[Chunk],
        rows: RowBatch,
        residual: Residual,
        compressed_ids: list[torch.Tensor],
        before_owner: Callable[[int], None],
    ) -> tuple[RowBatch, Residual]:
        """All layers; the rows that are left are those that ran through the decoder half."""
        selection = Selection()
        entries = {ratio: plan_entries(rows, ratio) for ratio in self._entry_ratios}
        rows = see_windows(rows, self.config.window, is_decoder=False)
        targets = []
        for role, weights in zip(self.roles, self.weights.layers, strict=True):
            if role.engram is not None:
                assert weights.engram is not None
                residual = self._engram.add(
                    role.engram, weights.engram, residual, rows, compressed_ids
                )
            x_TE = self.mixer.enter(residual, weights.attention_norm)
            if role.owns_kv:
                before_owner(role.index)
                self._write_entries(role, weights, x_TE, rows, entries[role.ratio])
            if role.index == self.config.decoder_start:
                rows, residual, x_TE = self._enter_decoder(chunks, rows, residual, x_TE)
                if rows.count == 0:
                    return rows, residual
            if role.index in self.config.draft.target_layer_ids:
                targets.append(mean_of_streams(residual.streams_TNE))
            residual = self._run_layer(role, weights, x_TE, rows, residual, selection)
        if self.weights.draft is not None:
            self._draft_context.write(self.weights.draft, torch.cat(targets, dim=1), rows)
        return rows, residual

    def _write_entries(
        self,
        role: LayerRole,
        weights: LayerWeights,
        x_TE: torch.Tensor,
        rows: RowBatch,
        entries: EntryRows,
    ) -> None:
        """An owner's entries are those of all rows, of those too that end here."""
        compressor, indexer = weights.attention.compressor, weights.attention.indexer
        assert compressor is not None
        assert indexer is not None
        self._entries.write(role, compressor, indexer, x_TE, rows, entries)

    def _enter_decoder(
        self, chunks: Sequence[Chunk], rows: RowBatch, residual: Residual, x_TE: torch.Tensor
    ) -> tuple[RowBatch, Residual, torch.Tensor]:
        """Rows, residual and normed input of what goes on into the decoder half."""
        firsts = [begin_decoder(chunk) for chunk in chunks]
        if any(first > span.first for first, span in zip(firsts, rows.spans, strict=True)):
            rows, kept = keep_tails(rows, firsts)
            residual, x_TE = residual[kept], x_TE[kept]
        return see_windows(rows, self.config.window, is_decoder=True), residual, x_TE

    def _run_layer(
        self,
        role: LayerRole,
        weights: LayerWeights,
        x_TE: torch.Tensor,
        rows: RowBatch,
        residual: Residual,
        selection: Selection,
    ) -> Residual:
        y_TE = self._attention.run(role, weights.attention, x_TE, rows, selection)
        rows.observe("attn_in", role.index, x_TE)
        rows.observe("attn_out", role.index, y_TE)
        residual = self.mixer.leave(residual, y_TE, weights.attention_mix, rows)
        x_TE = self.mixer.enter(residual, weights.experts_norm)
        y_TE = self.feed_forward.run(
            weights.experts,
            x_TE,
            rows,
            experts_per_token=self.config.experts_per_token,
            layer=role.index,
        )
        rows.observe("ffn_in", role.index, x_TE)
        rows.observe("ffn_out", role.index, y_TE)
        residual = self.mixer.leave(residual, y_TE, weights.experts_mix, rows)
        rows.observe("streams", role.index, residual.streams_TNE)
        rows.observe("ffn_pre", role.index, residual.pre_TN)
        return residual

    def _logits(self, rows: RowBatch, residual: Residual, wants_all: bool) -> ForwardResult:
        asked = [
            torch.arange(
                span.rows.start if wants_all else max(span.rows.stop - 1, span.rows.start),
                span.rows.stop,
                device=rows.positions_T.device,
            )
            for span in rows.spans
        ]
        index = torch.cat(asked)
        hidden_TE = self.mixer.collapse(residual[index])
        rows.observe("final_hidden", self.config.layers, hidden_TE)
        normed_TE = self.operations.rms_norm(hidden_TE, self.weights.norm, self.config.norm_epsilon)
        logits_TV = self.operations.linear(normed_TE, self.weights.head, rows.tiles.select(index))
        counts = [len(rows_of_span) for rows_of_span in asked]
        return ForwardResult(list(logits_TV.split(counts)), list(hidden_TE.split(counts)))


def begin_decoder(chunk: Chunk) -> int:
    """Note in the state that the decoder half starts later, if it does; the position it starts at.

    Window rows of tokens that ran the encoder half only do not exist in the decoder's rings.
    """
    state = chunk.state
    if chunk.decoder_first > state.length:
        end = state.length + len(chunk.token_ids)
        state.decoder_window_start = min(chunk.decoder_first, end)
    return chunk.decoder_first


def check_chunks(chunks: Sequence[Chunk], config: DeepseekV41Config) -> None:
    """Broken invariants of the caller end the pass before it wrote anything."""
    assert chunks, "a pass without sequences"
    assert len({id(chunk.state) for chunk in chunks}) == len(chunks), "a sequence is there twice"
    for chunk in chunks:
        ids = chunk.token_ids
        assert len(ids) > 0, "a chunk without tokens"
        is_known = 0 <= min(ids) <= max(ids) < config.vocabulary
        assert is_known, (
            f"token ids {min(ids)} to {max(ids)}, expected 0 to {config.vocabulary - 1}"
        )
        end = chunk.state.length + len(ids)
        assert end <= config.positions_max, f"{end} tokens, expected <= {config.positions_max}"
        room = chunk.state.capacity_tokens
        assert end <= room, f"{end} tokens, the state's blocks have room for {room}"
        assert chunk.entries_first % group_tokens(config) == 0, chunk.entries_first
        if chunk.image is not None:
            check_image(chunk.image, len(ids), config.hidden)


def check_image(image: ImageRows, tokens: int, hidden: int) -> None:
    """As `check_chunks`: a wrong shape would be spread over the rows, not refused."""
    assert image.is_image_T.dtype == torch.bool, image.is_image_T.dtype
    assert image.is_image_T.shape == (tokens,), (image.is_image_T.shape, tokens)
    if image.embeddings is not None:
        expected = (int(image.is_image_T.sum()), hidden)
        assert image.embeddings.shape == expected, (image.embeddings.shape, expected)
        assert image.embeddings.isfinite().all(), "an image embedding is not a number"
