"""The rows of one forward pass: which token of which sequence each row is, and what it may see.

A pass runs the next tokens of one or more sequences together. What is done row by row sees only
`positions_T` and the tiles; what needs a sequence's cache goes span by span. What is the same for
all layers is worked out here, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.reference.rope import rope_tables
from kernels.reference.tiles import RowTiles, plan_tiles

from ...upload import upload
from .observing import Observer, ignore
from .state import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRows:
    """Positions of a chunk that belong to images.

    `is_image_T`: bool [T], on the host. `embeddings` [image rows, E], anywhere, take the place of
    the token's own; None keeps the embedding of the image token.
    """

    is_image_T: torch.Tensor
    embeddings: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The next tokens of one sequence: positions `state.length` and on.

    The state has blocks for them. `decoder_first`: tokens at positions before it run the encoder
    half only; they write block KV and give no logits. `entries_first`: compressed entries of
    tokens before it are in the blocks already and stay as they are (a multiple of every ratio).
    """

    state: SequenceState
    token_ids: Sequence[int]
    decoder_first: int = 0
    entries_first: int = 0
    image: ImageRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """cos and sin of rows' angles, float32 [T, R / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> "Rope":
        return Rope(self.cos[rows], self.sin[rows])


@dataclass(frozen=True, slots=True, eq=False)
class RopeFrequencies:
    """Inverse frequencies, float32 [R / 2]: of window-only layers, and of compressed ones."""

    window: torch.Tensor
    compressed: torch.Tensor

    def tables(self, positions: torch.Tensor, *, is_compressed: bool) -> Rope:
        frequencies = self.compressed if is_compressed else self.window
        return Rope(*rope_tables(frequencies, positions))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Rows `rows` of the pass are positions first .. end - 1 of one sequence."""

    state: SequenceState
    rows: slice
    first: int
    end: int
    entries_first: int
    block_ids: torch.Tensor
    """int64 [blocks of the sequence]."""
    positions_T: torch.Tensor
    tiles: RowTiles
    """Of the span's rows alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowView:
    """Which window rows the queries of a span see: row 0 stands at position `base`.

    `index_TW` int64 [T, window], ascending; -1 where there is no row to see. Rows from the span's
    own first position on are of the pass itself, those before are in the sequence's ring.
    """

    base: int
    index_TW: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatch:
    """All rows of a pass, or those that go on into the decoder half."""

    spans: tuple[Span, ...]
    windows: tuple[WindowView, ...] = ()
    """One for each span, once `see_windows` was asked for the half that runs."""
    positions_T: torch.Tensor
    is_image_T: torch.Tensor
    tiles: RowTiles
    rope: Rope
    """Of window-only layers."""
    compress_rope: Rope
    frequencies: RopeFrequencies
    observe: Observer

    @property
    def count(self) -> int:
        return len(self.positions_T)


def plan_rows(
    chunks: Sequence[Chunk],
    frequencies: RopeFrequencies,
    device: torch.device,
    observe: Observer = ignore,
) -> RowBatch:
    """Rows of all chunks, in their order."""
    spans = []
    begin = 0
    for chunk in chunks:
        first = chunk.state.length
        count = len(chunk.token_ids)
        positions_T = torch.arange(first, first + count, device=device)
        spans.append(
            Span(
                state=chunk.state,
                rows=slice(begin, begin + count),
                first=first,
                end=first + count,
                entries_first=chunk.entries_first,
                block_ids=upload(torch.tensor(chunk.state.block_ids, dtype=torch.int64), device),
                positions_T=positions_T,
                tiles=plan_tiles(positions_T),
            )
        )
        begin += count
    is_image_T = torch.zeros(begin, dtype=torch.bool, device=device)
    for chunk, span in zip(chunks, spans, strict=True):
        if chunk.image is not None:
            is_image_T[span.rows] = upload(chunk.image.is_image_T, device)
    return _batch(spans, is_image_T, frequencies, observe)


def keep_tails(rows: RowBatch, decoder_firsts: Sequence[int]) -> tuple[RowBatch, torch.Tensor]:
    """Rows at or after positions `decoder_firsts` (one a span); and their indices, int64."""
    spans, kept = [], []
    device = rows.positions_T.device
    begin = 0
    for span, decoder_first in zip(rows.spans, decoder_firsts, strict=True):
        first = min(max(span.first, decoder_first), span.end)
        count = span.end - first
        kept.append(torch.arange(span.rows.stop - count, span.rows.stop, device=device))
        positions_T = span.positions_T[first - span.first :]
        spans.append(
            replace(
                span,
                rows=slice(begin, begin + count),
                first=first,
                positions_T=positions_T,
                tiles=plan_tiles(positions_T),
            )
        )
        begin += count
    index = torch.cat(kept)
    return _batch(spans, rows.is_image_T[index], rows.frequencies, rows.observe), index


def see_windows(rows: RowBatch, window: int, *, is_decoder: bool) -> RowBatch:
    """The rows with what their queries see of the rings of one half's layers.

    A query at p sees positions max(p - window + 1, window start of the half) .. p.
    """
    views = []
    for span in rows.spans:
        state = span.state
        start = state.decoder_window_start if is_decoder else state.encoder_window_start
        base = min(max(start, span.first - window + 1), span.first)
        index_TW = window_index(span.positions_T, window, start, base)
        views.append(WindowView(base=base, index_TW=index_TW))
    return replace(rows, windows=tuple(views))


def window_index(positions_T: torch.Tensor, window: int, start: int, base: int) -> torch.Tensor:
    """int64 [T, window]: for each query the rows from max(p - window + 1, start) to its own p.

    Row 0 stands at position `base`; -1 where there is none.
    """
    offsets = torch.arange(1 - window, 1, device=positions_T.device)
    seen = positions_T.unsqueeze(1) + offsets
    return torch.where(seen >= start, seen - base, -1)


def _batch(
    spans: Sequence[Span],
    is_image_T: torch.Tensor,
    frequencies: RopeFrequencies,
    observe: Observer,
) -> RowBatch:
    positions_T = torch.cat([span.positions_T for span in spans])
    return RowBatch(
        spans=tuple(spans),
        positions_T=positions_T,
        is_image_T=is_image_T,
        tiles=spans[0].tiles if len(spans) == 1 else plan_tiles(positions_T),
        rope=frequencies.tables(positions_T, is_compressed=False),
        compress_rope=frequencies.tables(positions_T, is_compressed=True),
        frequencies=frequencies,
        observe=observe,
    )
