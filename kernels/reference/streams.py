"""Manifold-constrained hyper-connections: n residual streams, and how a site reads and writes them.

A site is one attention or feed-forward block. It reads a weighted sum of the streams (`pre`) and
writes back to each (`post`, `comb`); the weights are functions of the streams themselves. Which
site uses which `pre` (the released model shifts them by one) is the model's business.
"""

from dataclasses import dataclass

import torch

from .activations import sigmoid
from .linear import linear
from .norm import mean_square
from .ordered_sum import sum_in_order
from .tiles import RowTiles


@dataclass(frozen=True, slots=True, eq=False)
class StreamMix:
    """Weights of one site: `pre` and `post` [..., n], `comb` [..., n from, n to]; float32."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def flatten_streams(streams: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """[..., n, E] -> [..., n E], divided by the root mean square of all n E entries."""
    flat = streams.flatten(-2)
    return flat * torch.rsqrt(mean_square(flat) + norm_eps)


def project_streams(
    streams_TNE: torch.Tensor, projection: torch.Tensor, norm_eps: float, tiles: RowTiles
) -> torch.Tensor:
    """What `mix_streams` takes, [T, (2 + n) n]; `projection`: [(2 + n) n, n E], float32."""
    return linear(flatten_streams(streams_TNE, norm_eps), projection, tiles)


def mix_streams(
    m: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iterations: int, eps: float
) -> StreamMix:
    """The weights of a site from the projected streams m [..., (2 + n) n].

    m and base ([(2 + n) n]) are [pre n | post n | comb n x n], each with its own of the three
    scales. pre = sigmoid + eps, post = 2 sigmoid; comb: softmax over rows, then Sinkhorn
    iterations that end with normalised columns. Differentiable.
    """
    n = streams_of(m.shape[-1])
    # Each range is scaled and shifted on its own: the scales stay tensors, for training.
    pre, post, comb = m.split((n, n, n * n), -1)
    pre_base, post_base, comb_base = base.split((n, n, n * n))
    pre_scale, post_scale, comb_scale = scale.unbind()
    gates = torch.cat((pre * pre_scale + pre_base, post * post_scale + post_base), -1)
    pre, post = sigmoid(gates).split((n, n), -1)
    comb = (comb * comb_scale + comb_base).unflatten(-1, (n, n))
    return StreamMix(pre + eps, 2 * post, _sinkhorn(comb, iterations, eps))


def streams_of(width: int) -> int:
    """n, of a width (2 + n) n."""
    n = 1
    while (2 + n) * n < width:
        n += 1
    assert (2 + n) * n == width, f"width {width}, expected (2 + n) n for some n"
    return n


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[..., n, n] with columns (and nearly rows) that sum to 1; six calls an iteration."""
    exponentials = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    comb = exponentials / sum_in_order(exponentials, -1) + eps
    comb = comb / (sum_in_order(comb, -2) + eps)
    for _ in range(iterations - 1):
        comb = comb / (sum_in_order(comb, -1) + eps)
        comb = comb / (sum_in_order(comb, -2) + eps)
    return comb


def collapse_streams(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """What a site reads: sum over k of pre_k X_k; [..., n, E] and [..., n] -> [..., E]."""
    return sum_in_order(streams * pre.unsqueeze(-1), -2).squeeze(-2)


def write_back_streams(streams: torch.Tensor, y: torch.Tensor, mix: StreamMix) -> torch.Tensor:
    """The streams after a site with output y [..., E]: X'_k = post_k y + sum_j comb_jk X_j."""
    froms = streams.unsqueeze(-2).unbind(-3)
    weights = mix.comb.unsqueeze(-1).unbind(-3)
    mixed = weights[0] * froms[0]
    for weight, stream in zip(weights[1:], froms[1:], strict=True):
        mixed = mixed + weight * stream
    return mix.post.unsqueeze(-1) * y.unsqueeze(-2) + mixed
