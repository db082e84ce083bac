"""Sums over a small dimension in one order, whatever the other dimensions are."""

import torch

_SEQUENTIAL_TERMS = 4
"""Up to so many terms `torch.sum` adds one after the other on every path; beyond, it picks an
order by shape and strides, and one row alone may get another than the same row among others."""


def sum_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim`, which stays with size 1: ((x_0 + x_1) + x_2) + ...; differentiable.

    For few terms (streams, chosen experts): one call for up to four, else one for each term.
    """
    if x.shape[dim] <= _SEQUENTIAL_TERMS:
        return x.sum(dim, keepdim=True)
    first, *others = x.split(1, dim)
    for term in others:
        first = first + term
    return first
