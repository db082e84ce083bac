"""The pooling of a group of tokens into one latent (DeepSeek-V4.1, CSA2).

Not for the projections before it, nor for the norm, rotation and quantisation behind it.
"""

import torch


def compress_groups(gate: torch.Tensor | None, content: torch.Tensor) -> torch.Tensor:
    """[..., G, D]: of each channel the content, averaged with the softmax of its gate.

    `gate` and `content` are [..., G, r, D], f32: the r tokens of a group in their order. Without a
    gate a group is one token (r = 1) and the latent is its content, unchanged. Differentiable.

    c = sum_t exp(gate_t) content_t / sum_t exp(gate_t), over the r tokens one after the other.
    """
    if gate is None:
        assert content.shape[-2] == 1, "tokens of a group need a gate to be weighed with"
        return content[..., 0, :]
    assert gate.shape == content.shape, (gate.shape, content.shape)
    tokens = range(content.shape[-2])
    top = gate[..., 0, :]
    for t in tokens[1:]:
        top = torch.maximum(top, gate[..., t, :])
    # The shift cancels out, so no gradient goes through it.
    top = top.detach()
    weights = [(gate[..., t, :] - top).contiguous().exp() for t in tokens]
    total = weights[0]
    mixed = weights[0] * content[..., 0, :]
    for t in tokens[1:]:
        total = total + weights[t]
        mixed = mixed + weights[t] * content[..., t, :]
    return mixed / total
