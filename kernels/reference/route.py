"""Which experts a token goes to, and with which weights."""

import torch

from .activations import softplus
from .ordered_sum import sum_in_order


def route_tokens(
    logits: torch.Tensor,
    bias: torch.Tensor,
    bias_image: torch.Tensor,
    is_image: torch.Tensor | None,
    k: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [..., k], ascending, and their weights float32 [..., k].

    Scores are sqrt(softplus(logits [..., X])). The k largest of score + bias are chosen, the lowest
    number first among equals; the bias ([X], `bias_image` where `is_image` [...] says so; None for
    nowhere) is for the choice only. Weights are the scores, divided by their sum + 1e-20 if k > 1,
    times `scaling`; they are differentiable.
    """
    scores = softplus(logits).sqrt()
    if is_image is not None:
        bias = torch.where(is_image.unsqueeze(-1), bias_image, bias)
    # A stable sort: `topk` leaves the order of equals open.
    order = (scores.detach() + bias).sort(dim=-1, descending=True, stable=True).indices
    experts = order[..., :k].sort(dim=-1).values
    weights = scores.gather(-1, experts)
    if k > 1:
        weights = weights / (sum_in_order(weights, -1) + 1e-20)
    return experts, weights * scaling
