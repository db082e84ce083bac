"""The residual of a token: several streams, mixed anew around each sublayer (mHC, single pass).

A sublayer's input is a collapse of the streams by gates that the sublayer *before* it computed;
its own gates serve the next one.
"""

from dataclasses import dataclass

import torch

from kernels.operations import Operations

from .config import DeepseekV41Config
from .rows import RowBatch
from .weights import StreamMixWeights


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """`streams_TNE`, and the gates `pre_TN` that collapse them for the next sublayer."""

    streams_TNE: torch.Tensor
    pre_TN: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> "Residual":
        return Residual(self.streams_TNE[rows], self.pre_TN[rows])


def begin_residual(embedding_TE: torch.Tensor, streams: int) -> Residual:
    """Every stream starts as the embedding; the first sublayer sees stream 0."""
    streams_TNE = embedding_TE.unsqueeze(1).repeat(1, streams, 1)
    pre_TN = embedding_TE.new_zeros(len(embedding_TE), streams)
    pre_TN[:, 0] = 1
    return Residual(streams_TNE, pre_TN)


@dataclass(frozen=True, slots=True, eq=False)
class ResidualMixer:
    config: DeepseekV41Config
    operations: Operations

    def enter(self, residual: Residual, norm_E: torch.Tensor) -> torch.Tensor:
        """The normed input [T, E] of the next sublayer."""
        collapsed_TE = self.collapse(residual)
        return self.operations.rms_norm(collapsed_TE, norm_E, self.config.norm_epsilon)

    def collapse(self, residual: Residual) -> torch.Tensor:
        """[T, E]: what the next sublayer, or the head, sees before its norm."""
        return self.operations.collapse_streams(residual.streams_TNE, residual.pre_TN)

    def leave(
        self, residual: Residual, y_TE: torch.Tensor, weights: StreamMixWeights, rows: RowBatch
    ) -> Residual:
        """Put a sublayer's output into the streams; gates are those of the streams before it."""
        config, operations = self.config, self.operations
        projected = operations.project_streams(
            residual.streams_TNE, weights.projection, config.norm_epsilon, rows.tiles
        )
        mix = operations.mix_streams(
            projected,
            weights.base,
            weights.scale,
            config.sinkhorn_iterations,
            config.stream_epsilon,
        )
        streams_TNE = operations.write_back_streams(residual.streams_TNE, y_TE, mix)
        return Residual(streams_TNE, mix.pre)


def mean_of_streams(streams_TNE: torch.Tensor) -> torch.Tensor:
    """[T, E]. Summed one by one: the order must not depend on the number of rows."""
    total = streams_TNE[:, 0]
    for stream in range(1, streams_TNE.shape[1]):
        total = total + streams_TNE[:, stream]
    return total / streams_TNE.shape[1]
