"""What depends on the length of the sequences only: rotations, masks and n-gram rules.

Made once for a length and a device, before any step, and read by every step.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.config import DeepseekV41Config, EngramConfig, YarnScaling
from kernels.reference.ngrams import hash_ngrams, ngram_multipliers, plan_tables
from kernels.reference.rope import rope_frequencies, rope_tables

from .masked_selection import mark_visible
from .window_attention import cut_pieces, mark_window


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """cos and sin float32 [P, R / 2] of positions 0, 1, .."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rows(self, index: torch.Tensor | slice) -> "RopeTable":
        return RopeTable(self.cos[index], self.sin[index])

    def turn(self, x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotate the last channels of x [B, P, ..., D]."""
        between = (1,) * (x.ndim - self.cos.ndim - 1)
        *positions, pairs = self.cos.shape
        cos = self.cos.view(*positions, *between, pairs)
        sin = self.sin.view(*positions, *between, pairs)
        rotated = 2 * pairs
        kept, turned = x.split((x.shape[-1] - rotated, rotated), -1)
        even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)
        if inverse:
            sin = -sin
        pair = (even * cos - odd * sin, even * sin + odd * cos)
        return torch.cat((kept, torch.stack(pair, -1).flatten(-2)), -1)


@dataclass(frozen=True, slots=True, eq=False)
class NgramTable:
    """One Engram table: `primes`, `offsets` int64 [columns], `multipliers` int64 [n-gram max]."""

    primes: torch.Tensor
    offsets: torch.Tensor
    multipliers: torch.Tensor


class Positions:
    """Of sequences of `tokens` tokens that start at position 0."""

    def __init__(
        self,
        config: DeepseekV41Config,
        tokens: int,
        device: torch.device,
        compressed_ids_V: torch.Tensor,
    ) -> None:
        """`compressed_ids_V`: Engram's id of each token, int64 [V]."""
        self.config, self.tokens, self.device = config, tokens, device
        # A draft block stands after the last token.
        self.rotated = tokens + config.draft.block_tokens + 1
        self.window_rope = self._rope(config.rope_theta, None)
        self.compressed_rope = self._rope(config.compress_rope_theta, config.yarn)
        self.pieces = -(-tokens // config.window)
        self.is_seen_CWK = mark_window(self.pieces, config.window, device)
        self._visible: dict[int, torch.Tensor] = {}
        self._compressed_ids_V = compressed_ids_V.to(device, torch.int64)
        if config.engram is not None:
            self._pad_id = int(compressed_ids_V[config.engram.pad_token_id])
            self._tables = _plan_ngrams(config.engram, device)
        for ratio in {1, *filter(None, config.compress_ratios)}:
            self._visible[ratio] = mark_visible(tokens, tokens // ratio, ratio, device)

    def _rope(self, theta: float, yarn: YarnScaling | None) -> RopeTable:
        frequencies = rope_frequencies(self.config.rope_dim, theta, yarn)
        cos, sin = rope_tables(frequencies, torch.arange(self.rotated))
        return RopeTable(cos.to(self.device), sin.to(self.device))

    def rope_of(self, ratio: int) -> RopeTable:
        """For the tokens of a layer of that compress ratio."""
        rope = self.compressed_rope if ratio else self.window_rope
        return rope.rows(slice(0, self.tokens))

    def rope_of_entries(self, ratio: int) -> RopeTable:
        """At the first token of each group."""
        return self.compressed_rope.rows(slice(0, self.tokens // ratio * ratio, ratio))

    def is_visible(self, ratio: int) -> torch.Tensor:
        """bool [T, G]."""
        return self._visible[ratio]

    def is_visible_CWG(self, ratio: int) -> torch.Tensor:
        return cut_pieces(self._visible[ratio].unsqueeze(0), self.config.window)[0]

    def ngram_rows(self, table: int, ids_BT: torch.Tensor) -> torch.Tensor:
        """Rows int64 [B, T, columns] of a table for token ids."""
        compressed = self._compressed_ids_V[ids_BT]
        assert self.config.engram is not None
        before = compressed.new_full((len(ids_BT), self.config.engram.ngram_max - 1), -1)
        its = self._tables[table]
        return hash_ngrams(
            torch.cat([before, compressed], dim=1),
            its.multipliers,
            its.primes,
            its.offsets,
            self._pad_id,
        )


def _plan_ngrams(engram: EngramConfig, device: torch.device) -> list[NgramTable]:
    primes, offsets = plan_tables(
        tables=len(engram.layer_ids),
        ngram_max=engram.ngram_max,
        heads=engram.heads,
        base_rows=engram.base_rows,
    )
    multipliers = ngram_multipliers(
        engram.layer_ids, engram.compressed_vocabulary, engram.ngram_max
    )
    return [
        NgramTable(*(part.to(device) for part in parts))
        for parts in zip(primes, offsets, multipliers, strict=True)
    ]
