"""Engram: n-grams of the last tokens look up rows of a table, which are added to the streams.

Tokens are first mapped to a smaller vocabulary in which spellings of one word fall together
(`engram_vocabulary`). Of a sequence only its last few ids are state.
"""

from collections.abc import Sequence

import torch

from kernels.operations import Operations
from kernels.reference.ngrams import ngram_multipliers, plan_tables

from .config import DeepseekV41Config
from .residual import Residual
from .rows import Chunk, RowBatch
from .state import NO_ID
from .weights import EngramWeights


class Engram:
    """The lookups of every layer that has a table; of a model without any, nothing to do."""

    def __init__(
        self,
        config: DeepseekV41Config,
        operations: Operations,
        compressed_ids_V: torch.Tensor,
        device: torch.device,
    ) -> None:
        """`device`: of the weights. Ids of tokens are looked up on the host, where they are known
        before a pass and needed after it."""
        assert len(compressed_ids_V) == config.vocabulary, len(compressed_ids_V)
        self._norm_epsilon = config.norm_epsilon
        self._operations = operations
        self._compressed_ids_V = compressed_ids_V.to("cpu", torch.int64)
        engram = config.engram
        self._has_tables = engram is not None
        if engram is None:
            return
        low, high = (int(bound) for bound in self._compressed_ids_V.aminmax())
        assert 0 <= low <= high < engram.compressed_vocabulary, (low, high)
        self._lookback = engram.ngram_max - 1
        self._layers = engram.layer_ids
        self._pad_id = int(compressed_ids_V[engram.pad_token_id])
        primes, offsets = plan_tables(
            tables=len(engram.layer_ids),
            ngram_max=engram.ngram_max,
            heads=engram.heads,
            base_rows=engram.base_rows,
        )
        multipliers = ngram_multipliers(
            engram.layer_ids, engram.compressed_vocabulary, engram.ngram_max
        )
        self._primes, self._offsets = primes.to(device), offsets.to(device)
        self._multipliers = multipliers.to(device)

    def compress(
        self, chunks: Sequence[Chunk], token_ids: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compressed ids of each chunk's tokens after those of its lookback, int64 [L + T].

        `token_ids` (int64 [T]) are the chunks' own, on the host, and so is the result. NO_ID for
        tokens of images; none at all for a model without tables.
        """
        if not self._has_tables:
            return [ids_T[:0] for ids_T in token_ids]
        return [
            self._compress(chunk, ids_T) for chunk, ids_T in zip(chunks, token_ids, strict=True)
        ]

    def _compress(self, chunk: Chunk, token_ids_T: torch.Tensor) -> torch.Tensor:
        ids_T = self._compressed_ids_V[token_ids_T]
        if chunk.image is not None:
            ids_T = ids_T.masked_fill(chunk.image.is_image_T, NO_ID)
        return torch.cat((ids_T.new_tensor(chunk.state.recent_ids[-self._lookback :]), ids_T))

    def ids_of(self, token_ids: Sequence[int]) -> list[int]:
        """Compressed ids of some tokens, none of an image; empty for a model without tables."""
        if not self._has_tables or not token_ids:
            return []
        assert 0 <= min(token_ids) <= max(token_ids) < len(self._compressed_ids_V), token_ids
        return self._compressed_ids_V[torch.as_tensor(token_ids, dtype=torch.int64)].tolist()

    def add(
        self,
        table: int,
        weights: EngramWeights,
        residual: Residual,
        rows: RowBatch,
        compressed_ids: Sequence[torch.Tensor],
    ) -> Residual:
        """The streams with each row's value added; those of image tokens stay as they are.

        `compressed_ids`: what `compress` gave for the rows, on their device.
        """
        operations = self._operations
        index_TC = torch.cat([self._table_rows(table, ids) for ids in compressed_ids])
        rows.observe("engram_rows", self._layers[table], index_TC)
        found_TCD = operations.read_table_rows(weights.table.rows, weights.table.scales, index_TC)
        keys_values = operations.linear(found_TCD.flatten(1), weights.kv, rows.tiles)
        streams_TNE = operations.gate_engram(
            residual.streams_TNE,
            keys_values,
            weights.query_scale,
            weights.key_scale,
            rows.is_image_T,
            self._norm_epsilon,
        )
        rows.observe("engram_out", self._layers[table], streams_TNE)
        return Residual(streams_TNE, residual.pre_TN)

    def _table_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        return self._operations.hash_ngrams(
            ids,
            self._multipliers[table],
            self._primes[table],
            self._offsets[table],
            self._pad_id,
        )
