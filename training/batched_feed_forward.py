"""The mixture of experts for many tokens: every expert runs, those not chosen count 0.

At these sizes that is one product for all experts and far faster than sorting tokens by expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .masked_selection import mark_topk


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """`output` [..., E]; `counts` float32 [X]: tokens that went to each expert."""

    output: torch.Tensor
    counts: torch.Tensor


def route(
    logits: torch.Tensor, bias: torch.Tensor, k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [..., X], 0 for experts that are not chosen, and bool [..., X] for those that are."""
    scores = F.softplus(logits).sqrt()
    is_chosen = mark_topk(scores.detach() + bias, k)
    weights = scores * is_chosen
    if k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, is_chosen


def run_feed_forward(
    p: Mapping[str, torch.Tensor],
    prefix: str,
    x: torch.Tensor,
    *,
    k: int,
    scaling: float,
    limit: float,
) -> Routed:
    """Routed experts and the shared one, for normed inputs [..., E]."""
    logits = F.linear(x, p[f"{prefix}.gate.weight"])
    weights, is_chosen = route(logits, p[f"{prefix}.gate.bias"], k, scaling)
    experts = weights.shape[-1]
    gate, up, down = (p[f"{prefix}.experts.w{number}.weight"] for number in (1, 3, 2))
    hidden = _swiglu(F.linear(x, gate.flatten(0, 1)), F.linear(x, up.flatten(0, 1)), limit)
    hidden = hidden.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    routed = F.linear(hidden.flatten(-2), down.transpose(0, 1).flatten(1))
    gate, up, down = (p[f"{prefix}.shared_experts.w{number}.weight"] for number in (1, 3, 2))
    shared = F.linear(_swiglu(F.linear(x, gate), F.linear(x, up), limit), down)
    return Routed(routed + shared, is_chosen.flatten(0, -2).sum(0, dtype=torch.float32))


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


BIAS_STEP = 0.001


@torch.no_grad()
def balance_experts(bias: torch.Tensor, counts: torch.Tensor) -> None:
    """Move the bias of each expert a step towards equal shares; no loss is needed for it."""
    bias.add_((counts.mean() - counts).sign(), alpha=BIAS_STEP)
