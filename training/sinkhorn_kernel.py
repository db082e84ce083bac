"""Sinkhorn iterations on many n x n matrices as one launch each way, for CUDA devices with Triton.

The plain form, two dozen small calls an iteration and site, would take a third of all launches of a
step. Backward keeps nothing: what an iteration started from is computed again from the very
start, which costs arithmetic that the device has to spare.
"""

# Triton reads the annotations of a kernel: only those it knows may stand there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

_MATRICES_PER_PROGRAM = 32


@triton.jit
def _sums(m, axis: tl.constexpr, eps):
    """sum + eps along an axis of [M, n, n], in the shape of m."""
    return tl.broadcast_to(tl.sum(m, axis=axis, keep_dims=True) + eps, m.shape)


@triton.jit
def _iterate(m, eps):
    """Rows, then columns, divided by their sums."""
    m = m / _sums(m, 2, eps)
    return m / _sums(m, 1, eps)


@triton.jit
def _grad_before(grad, out, sums, axis: tl.constexpr):
    """out = m / (sum m + eps), so dm = (dout - sum(dout out)) / (sum m + eps)."""
    total = tl.broadcast_to(tl.sum(grad * out, axis=axis, keep_dims=True), grad.shape)
    return (grad - total) / sums


@triton.jit
def _forward_kernel(
    start_ptr, out_ptr, count, eps, ITERATIONS: tl.constexpr, N: tl.constexpr, M: tl.constexpr
):
    places, is_there = _places(count, N, M)
    m = tl.load(start_ptr + places, mask=is_there, other=1.0)
    m = m / _sums(m, 1, eps)
    for _iteration in range(1, ITERATIONS):
        m = _iterate(m, eps)
    tl.store(out_ptr + places, m, mask=is_there)


@triton.jit
def _backward_kernel(
    start_ptr,
    grad_ptr,
    out_ptr,
    count,
    eps,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    places, is_there = _places(count, N, M)
    start = tl.load(start_ptr + places, mask=is_there, other=1.0)
    grad = tl.load(grad_ptr + places, mask=is_there, other=0.0)
    first_sums = _sums(start, 1, eps)
    first = start / first_sums
    for done in range(1, ITERATIONS):
        m = first
        for _iteration in range(1, ITERATIONS - done):
            m = _iterate(m, eps)
        row_sums = _sums(m, 2, eps)
        rows = m / row_sums
        column_sums = _sums(rows, 1, eps)
        grad = _grad_before(grad, rows / column_sums, column_sums, 1)
        grad = _grad_before(grad, rows, row_sums, 2)
    grad = _grad_before(grad, first, first_sums, 1)
    tl.store(out_ptr + places, grad, mask=is_there)


@triton.jit
def _places(count, N: tl.constexpr, M: tl.constexpr):
    matrix = tl.program_id(0) * M + tl.arange(0, M)
    row = tl.arange(0, N)
    within = row[:, None] * N + row[None, :]
    places = matrix[:, None, None] * (N * N) + within[None, :, :]
    is_there = tl.broadcast_to((matrix < count)[:, None, None], places.shape)
    return places, is_there


def sinkhorn_forward(start: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Columns, then (iterations - 1) times rows and columns of start [..., n, n], n = 2^k."""
    start = start.contiguous()
    out = torch.empty_like(start)
    n = start.shape[-1]
    count = start.numel() // (n * n)
    grid = (triton.cdiv(count, _MATRICES_PER_PROGRAM),)
    _forward_kernel[grid](
        start, out, count, eps, ITERATIONS=iterations, N=n, M=_MATRICES_PER_PROGRAM, num_warps=1
    )
    return out


def sinkhorn_backward(
    start: torch.Tensor, grad: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    """The gradient of `start` from that of what `sinkhorn_forward` gave."""
    start, grad = start.contiguous(), grad.contiguous()
    out = torch.empty_like(start)
    n = start.shape[-1]
    count = start.numel() // (n * n)
    grid = (triton.cdiv(count, _MATRICES_PER_PROGRAM),)
    _backward_kernel[grid](
        start,
        grad,
        out,
        count,
        eps,
        ITERATIONS=iterations,
        N=n,
        M=_MATRICES_PER_PROGRAM,
        num_warps=1,
    )
    return out
