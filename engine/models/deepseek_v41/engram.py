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
from .rows import RowBatch
from .state import NO_ID
from .weights import EngramWeights


class Engram:
    """The lookups of every layer that has a table; of a model without any, nothing to do."""

    def __init__(
        self, config: DeepseekV41Config, operations: Operations, compressed_ids_V: torch.Tensor
    ) -> None:
        assert len(compressed_ids_V) == config.vocabulary, len(compressed_ids_V)
        self._norm_epsilon = config.norm_epsilon
        self._operations = operations
        self._compressed_ids_V = compressed_ids_V.to(torch.int64)
        engram = config.engram
        self._has_tables = engram is not None
        if engram is None:
            return
        low, high = (int(bound) for bound in self._compressed_ids_V.aminmax())
        assert 0 <= low <= high < engram.compressed_vocabulary, (low, high)
        self._lookback = engram.ngram_max - 1
        self._layers = engram.layer_ids
        self._pad_id = int(compressed_ids_V[engram.pad_token_id])
        self._primes, self._offsets = plan_tables(
            tables=len(engram.layer_ids),
            ngram_max=engram.ngram_max,
            heads=engram.heads,
            base_rows=engram.base_rows,
        )
        self._multipliers = ngram_multipliers(
            engram.layer_ids, engram.compressed_vocabulary, engram.ngram_max
        )

    def compress(self, token_ids_T: torch.Tensor, rows: RowBatch) -> list[torch.Tensor]:
        """Compressed ids of each span's tokens after those of its lookback, int64 [L + T].

        NO_ID for tokens of images; none at all for a model without tables.
        """
        if not self._has_tables:
            return [token_ids_T[:0] for _ in rows.spans]
        ids_T = torch.where(rows.is_image_T, NO_ID, self._compressed_ids_V[token_ids_T])
        return [
            torch.cat(
                (ids_T.new_tensor(span.state.recent_ids[-self._lookback :]), ids_T[span.rows])
            )
            for span in rows.spans
        ]

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

        `compressed_ids`: what `compress` gave for the rows.
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
