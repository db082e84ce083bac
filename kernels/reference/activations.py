"""Sigmoid, SiLU and softplus whose bits do not depend on where an element lies.

`torch.sigmoid`, `silu` and `softplus` compute most elements with vector instructions and the last
few of a tensor, or of a thread's share, one by one with another exponential: the same number gives
other bits in a tensor of another size. `exp` and `logsigmoid` treat all elements alike, so all is
made of these two; they are also safe from overflow, backwards as well.
"""

import torch
import torch.nn.functional as F


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), any shape, float32."""
    return F.logsigmoid(x).exp()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x), any shape, float32."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), any shape, float32."""
    return -F.logsigmoid(-x)
