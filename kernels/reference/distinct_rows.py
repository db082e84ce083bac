"""Which packed rows some lists name, each once: rows that many queries chose are read once.

Not for lists over a whole context: it sorts what it is given.
"""

import torch


def distinct_rows(index_TS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that the lists name and where each list finds its own.

    `index_TS`: int64, -1 for none. Returns `rows_U`, int64, ascending, without -1; and
    `places_TS`, int64: `rows_U[places_TS]` is `index_TS`; -1 stays -1, which in a table of the
    rows with one more row behind them is that last row.
    """
    rows_U, places_TS = torch.unique(index_TS, sorted=True, return_inverse=True)
    if len(rows_U) and rows_U[0] < 0:
        return rows_U[1:], places_TS - 1
    return rows_U, places_TS
