"""Matrix products whose rows do not depend on how many rows are computed together.

A matrix kernel sums in an order that depends on the shape of the call and on a row's place in it.
Here every product has exactly `TILE_ROWS` rows, and a row that stands at position p of its sequence
is always row p mod `TILE_ROWS`: with shape and place fixed, the bits of a row are a function of the
row alone. So a prompt gives equal bits in one piece, in chunks and token by token.
"""

from functools import cached_property

import torch

TILE_ROWS = 8
"""A token alone pays for so many rows; a long prompt makes a call for each so many."""


class RowTiles:
    """Where each of T rows stands in tiles of `TILE_ROWS` rows.

    `positions_T` (int64): what a row's place depends on, its position in its sequence. Rows of
    several sequences may share a tile. Places are worked out when they are first asked for: a back
    end of other means never does, and never waits for a device to count them.
    """

    def __init__(self, positions_T: torch.Tensor) -> None:
        self.positions_T = positions_T

    @property
    def rows(self) -> int:
        return len(self.positions_T)

    @cached_property
    def slots_T(self) -> torch.Tensor:
        """int64 [T]: tile x TILE_ROWS + place. The i-th row of a place goes to tile i."""
        places = self.positions_T % TILE_ROWS
        order = torch.argsort(places, stable=True)
        counts = torch.bincount(places, minlength=TILE_ROWS)
        starts = counts.cumsum(0) - counts
        tile = torch.empty_like(places)
        tile[order] = torch.arange(len(places), device=places.device) - starts[places[order]]
        return tile * TILE_ROWS + places

    @cached_property
    def count(self) -> int:
        """Tiles: as few as the places allow."""
        return int(self.slots_T.max()) // TILE_ROWS + 1 if self.rows else 0

    def select(self, rows: torch.Tensor) -> "RowTiles":
        """Tiles of some of the rows (int64 indices or a bool mask), packed anew."""
        return plan_tiles(self.positions_T[rows])

    def spread(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Rows at their places: [count, TILE_ROWS, ...]; places without a row hold zeros."""
        spread = x_TK.new_zeros(self.count * TILE_ROWS, *x_TK.shape[1:])
        spread.index_copy_(0, self.slots_T, x_TK)
        return spread.unflatten(0, (self.count, TILE_ROWS))

    def gather(self, tiles: torch.Tensor) -> torch.Tensor:
        """The rows back from [count, TILE_ROWS, ...], in their order."""
        return tiles.flatten(0, 1).index_select(0, self.slots_T)


def plan_tiles(positions_T: torch.Tensor) -> RowTiles:
    """Pack rows into as few tiles as their places allow."""
    return RowTiles(positions_T)
