"""The residual of many tokens: n streams that each sublayer reads and writes (mHC, single pass).

The meaning is that of `kernels.reference.streams`; here products are batched, and the Sinkhorn
iterations keep one tensor for the backward pass and not forty.
"""

# The library's context of a function has no type of its own.
# ruff: noqa: ANN001

from dataclasses import dataclass

import torch

try:
    from . import sinkhorn_kernel
except ImportError:  # Triton comes with torch for CUDA only.
    sinkhorn_kernel = None  # type: ignore[assignment]

MATMUL = torch.backends.cuda.matmul


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """`pre` and `post` [..., n], `comb` [..., n from, n to]."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class _ExactMatmul(torch.autograd.Function):
    """A batched product in whole float32, wherever other products may round to TF32.

    The streams carry a token through all layers: what is lost there is never made up for.
    """

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _in_full_precision(a, b)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = _in_full_precision(grad, b.mT) if ctx.needs_input_grad[0] else None
        grad_b = _in_full_precision(a.mT, grad) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def _in_full_precision(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "ieee"
    try:
        return torch.matmul(a, b)
    finally:
        MATMUL.fp32_precision = before


class _Sinkhorn(torch.autograd.Function):
    """Columns, then (iterations - 1) times rows and columns, divided by their sum + eps."""

    @staticmethod
    def forward(ctx, start: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        ctx.save_for_backward(start)
        ctx.iterations, ctx.eps = iterations, eps
        if start.is_cuda and sinkhorn_kernel is not None:
            return sinkhorn_kernel.sinkhorn_forward(start, iterations, eps)
        comb = start
        for dim in _dimensions(iterations):
            comb = comb / comb.sum(dim, keepdim=True).add_(eps)
        return comb

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (start,) = ctx.saved_tensors
        if start.is_cuda and sinkhorn_kernel is not None:
            return (
                sinkhorn_kernel.sinkhorn_backward(start, grad, ctx.iterations, ctx.eps),
                None,
                None,
            )
        return _sinkhorn_backward(start, grad, ctx.iterations, ctx.eps), None, None


def sinkhorn(start: torch.Tensor, *, iterations: int, eps: float) -> torch.Tensor:
    """start [..., n, n], positive, with columns, and nearly rows, that sum to 1."""
    return _Sinkhorn.apply(start, iterations, eps)


def _sinkhorn_backward(
    comb: torch.Tensor, grad: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    """out = m / (sum m + eps), so dm = (dout - sum(dout out)) / (sum m + eps)."""
    halves = []
    for dim in _dimensions(iterations):
        divisor = comb.sum(dim, keepdim=True).add_(eps)
        comb = comb / divisor
        halves.append((dim, comb, divisor))
    for dim, out, divisor in reversed(halves):
        grad = (grad - (grad * out).sum(dim, keepdim=True)) / divisor
    return grad


def _dimensions(iterations: int) -> list[int]:
    return [-2, *[-1, -2] * (iterations - 1)]


def begin_streams(embedding: torch.Tensor, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams [..., n, E], all equal, and the first gates [..., n], which open stream 0."""
    pre = embedding.new_zeros(*embedding.shape[:-1], streams)
    pre[..., 0] = 1
    return embedding.unsqueeze(-2).expand(*pre.shape, -1), pre


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """[..., E]: sum of pre_k X_k."""
    return _ExactMatmul.apply(pre.unsqueeze(-2), streams).squeeze(-2)


def write_back(streams: torch.Tensor, y: torch.Tensor, mix: Mix) -> torch.Tensor:
    """X'_k = post_k y + sum over j of comb_jk X_j."""
    mixed = _ExactMatmul.apply(mix.comb.mT, streams)
    return torch.addcmul(mixed, mix.post.unsqueeze(-1), y.unsqueeze(-2))


def mix_streams(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Mix:
    """The gates of one site from its streams [..., n, E]."""
    n = streams.shape[-2]
    flat = streams.flatten(-2)
    # The statistic is one number a token: it goes to the 24 products, not to all the channels.
    rms = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    m = torch.nn.functional.linear(flat, projection) * torch.rsqrt(rms + norm_eps)
    widths = (n, n, n * n)
    scales = torch.cat([one.expand(w) for one, w in zip(scale.split(1), widths, strict=True)])
    m = m * scales + base
    pre, post, comb = m.split(widths, dim=-1)
    start = torch.softmax(comb.unflatten(-1, (n, n)), dim=-1) + eps
    return Mix(
        torch.sigmoid(pre) + eps,
        2 * torch.sigmoid(post),
        sinkhorn(start, iterations=iterations, eps=eps),
    )
