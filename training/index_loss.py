"""How the indexer learns: its scores are to rank entries as attention would weigh them.

The choice of the top k has no gradient. As in DeepSeek-V3.2's sparse attention, the softmax of the
index scores over the entries a query may choose from is drawn to the mass that the layer's own
heads would give them (summed over heads, normalised), by Kullback-Leibler divergence, with no
gradient on the attention side. Mass is that over *all* visible entries, chosen or not, so that a
wrongly ignored entry is found. Rows are sampled: a share of the queries is enough.
"""

import torch

from .window_attention import Attended


def attention_mass(
    attended: Attended,
    is_seen_CWK: torch.Tensor,
    is_visible_CWG: torch.Tensor,
    sink_H: torch.Tensor,
    sampled_R: torch.Tensor,
) -> torch.Tensor:
    """[B, C, R, G]: mass of each entry, summed over heads, for the sampled queries of each piece.

    Window rows and the sink take their share, as they do when the layer runs.
    """
    assert attended.entry_logits is not None
    with torch.no_grad():
        window = attended.window_logits.index_select(3, sampled_R)
        entries = attended.entry_logits.index_select(3, sampled_R)
        is_seen = is_seen_CWK.index_select(1, sampled_R).unsqueeze(1)
        is_visible = is_visible_CWG.index_select(1, sampled_R).unsqueeze(1)
        window = window.masked_fill(~is_seen, float("-inf"))
        entries = entries.masked_fill(~is_visible, float("-inf"))
        sink = sink_H.view(-1, 1, 1).expand(*window.shape[:-1], 1)
        total = torch.logsumexp(torch.cat([window, entries, sink], dim=-1), dim=-1, keepdim=True)
        return (entries - total).exp().sum(2)


def index_divergence(
    scores: torch.Tensor, mass: torch.Tensor, may_be_chosen: torch.Tensor
) -> torch.Tensor:
    """Mean KL(mass || softmax of scores) over rows that have entries to choose from; a scalar.

    All three are [..., G] of the same rows; mass outside of `may_be_chosen` does not count.
    """
    mass = (mass * may_be_chosen).detach()
    total = mass.sum(-1, keepdim=True)
    has_choice = total.squeeze(-1) > 0
    target = mass / total.clamp(min=torch.finfo(mass.dtype).tiny)
    # Finite where nothing may be chosen: -inf times a gradient of 0 would be NaN.
    log_scores = torch.log_softmax(scores.masked_fill(~may_be_chosen, -1e30), dim=-1)
    divergence = (torch.xlogy(target, target) - target * log_scores).sum(-1)
    return (divergence * has_choice).sum() / has_choice.sum().clamp(min=1)
