"""Manifold-constrained hyper-connections in fewer kernels: the Sinkhorn iterations of the reference
are more than a hundred tiny ones, which cost their launch and nothing else."""

import torch

from ..reference.activations import sigmoid
from ..reference.streams import StreamMix, streams_of
from ..reference.tiles import RowTiles
from .linear import linear
from .norm import rms_norm


def project_streams(
    streams_TNE: torch.Tensor, projection: torch.Tensor, norm_eps: float, tiles: RowTiles
) -> torch.Tensor:
    """As the reference, within rounding."""
    return linear(rms_norm(streams_TNE.flatten(-2), None, norm_eps), projection, tiles)


def mix_streams(
    m: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iterations: int, eps: float
) -> StreamMix:
    """As the reference, within rounding; not differentiable."""
    n = streams_of(m.shape[-1])
    widths = (n, n, n * n)
    scale_M = torch.cat(
        [one.expand(width) for one, width in zip(scale.split(1), widths, strict=True)]
    )
    gates, comb = torch.addcmul(base, m, scale_M).split((2 * n, n * n), -1)
    pre, post = sigmoid(gates.contiguous()).split((n, n), -1)
    return StreamMix(pre + eps, 2 * post, _sinkhorn(comb.unflatten(-1, (n, n)), iterations, eps))


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[..., n, n], two kernels for each normalisation: what is added to a sum stands beside its
    terms, in a row and a column of their own."""
    n = logits.shape[-1]
    framed = logits.new_full((*logits.shape[:-2], n + 1, n + 1), eps)
    comb = framed[..., :n, :n]
    torch.add(logits.softmax(-1), eps, out=comb)
    comb.div_(framed[..., :n].sum(-2, keepdim=True))
    for _ in range(iterations - 1):
        comb.div_(framed[..., :n, :].sum(-1, keepdim=True))
        comb.div_(framed[..., :n].sum(-2, keepdim=True))
    return comb


def write_back_streams(streams: torch.Tensor, y: torch.Tensor, mix: StreamMix) -> torch.Tensor:
    """As the reference, within rounding: X'_k = post_k y + sum_j comb_jk X_j."""
    mixed = mix.post.unsqueeze(-1) * y.unsqueeze(-2)
    for weight, stream in zip(
        mix.comb.unsqueeze(-1).unbind(-3), streams.unsqueeze(-2).unbind(-3), strict=True
    ):
        mixed = torch.addcmul(mixed, weight, stream)
    return mixed
