"""What the draft stages keep of every committed token: one window row a stage (DSpark).

The rows are written with the pass that computes the token, in rings of their own beside those of
the layers, and are part of a sequence's state whether anyone drafts or not.
"""

from dataclasses import dataclass

import torch

from kernels.operations import Operations

from .attention import window_rows
from .config import DeepseekV41Config
from .rows import RowBatch
from .weights import DraftWeights


@dataclass(frozen=True, slots=True, eq=False)
class DraftContext:
    config: DeepseekV41Config
    operations: Operations

    def write(self, weights: DraftWeights, targets_TE3: torch.Tensor, rows: RowBatch) -> None:
        """`targets_TE3` [T, targets x E]: the streams' means on entry to each target layer."""
        rows.observe("main_hidden", self.config.layers, targets_TE3)
        context_TE = self.operations.rms_norm(
            self.operations.linear(targets_TE3, weights.context_projection, rows.tiles),
            weights.context_norm,
            self.config.norm_epsilon,
        )
        for stage, layer in enumerate(weights.stages):
            window_TB = window_rows(
                self.config, self.operations, layer.attention, context_TE, rows, rows.rope
            )
            for span in rows.spans:
                span.state.write_window_rows(
                    self.config.layers + stage, span.first, window_TB[span.rows]
                )
