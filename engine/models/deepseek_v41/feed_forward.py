"""The mixture of experts that every layer ends with."""

from dataclasses import dataclass

import torch

from kernels.operations import Operations

from .config import DeepseekV41Config
from .rows import RowBatch
from .weights import ExpertsWeights


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """Routed experts and one shared expert; products and sums in float32."""

    config: DeepseekV41Config
    operations: Operations

    def run(
        self,
        weights: ExpertsWeights,
        x_TE: torch.Tensor,
        rows: RowBatch,
        *,
        experts_per_token: int,
        layer: int,
    ) -> torch.Tensor:
        """Output [T, E] for the normed input; images' tokens are routed by a bias of their own."""
        operations, limit = self.operations, self.config.swiglu_limit
        experts_TK, weights_TK = operations.route_tokens(
            operations.linear(x_TE, weights.router, rows.tiles),
            weights.bias,
            weights.bias_image,
            rows.is_image_T,
            experts_per_token,
            self.config.routed_scaling,
        )
        rows.observe("experts", layer, experts_TK)
        routed_TE = operations.run_experts(
            x_TE, experts_TK, weights_TK, weights.gate, weights.up, weights.down, limit, rows.tiles
        )
        hidden_TF = operations.swiglu(
            operations.linear(x_TE, weights.shared_gate, rows.tiles),
            operations.linear(x_TE, weights.shared_up, rows.tiles),
            limit,
        )
        return routed_TE + operations.linear(hidden_TF, weights.shared_down, rows.tiles)
