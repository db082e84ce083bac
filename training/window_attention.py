"""Attention of many tokens at once over a sliding window, marked entries and a sink.

Queries are cut into pieces of one window: a piece sees the rows of its own and of the piece before
it, so the work does not grow with the square of the length. All heads share one latent row a
token, which is key and value.
"""

from dataclasses import dataclass

import torch

_SINK_COLUMNS = 8
"""The sink is one column; so many keep the rows of the products aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """`output` [B, T, H, D]; logits of pieces [B, C, H, W, ...], before any mask.

    `window_logits` [.., 2 W], `entry_logits` [.., G] or None without entries.
    """

    output: torch.Tensor
    window_logits: torch.Tensor
    entry_logits: torch.Tensor | None


def mark_window(pieces: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [C, W, 2 W]: which rows of the piece before and of its own each query sees."""
    query = torch.arange(window, device=device).unsqueeze(-1)
    row = torch.arange(2 * window, device=device) - window
    is_seen = (row <= query) & (row > query - window)
    is_there = (row >= 0) | (torch.arange(pieces, device=device) > 0).view(-1, 1, 1)
    return is_seen & is_there


def cut_pieces(x: torch.Tensor, window: int) -> torch.Tensor:
    """[B, C, W, ...] of [B, T, ...], with zeros after the end."""
    missing = -x.shape[1] % window
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    return x.unflatten(1, (-1, window))


def attend(
    q_BTHD: torch.Tensor,
    rows_BTD: torch.Tensor,
    is_seen_CWK: torch.Tensor,
    entries_BGD: torch.Tensor | None,
    is_chosen_BTG: torch.Tensor | None,
    sink_H: torch.Tensor,
    scale: float,
) -> Attended:
    """One softmax over window rows, chosen entries and the sink; an entry that is also a window
    row counts twice."""
    tokens, window = q_BTHD.shape[1], is_seen_CWK.shape[1]
    q = cut_pieces(q_BTHD * scale, window).transpose(2, 3)
    batch, pieces, heads, _, dim = q.shape
    own = cut_pieces(rows_BTD, window)
    keys = torch.cat([torch.cat([own[:, :1], own[:, :-1]], dim=1), own], dim=2)
    window_logits = (q.reshape(batch, pieces, heads * window, dim) @ keys.mT).unflatten(
        2, (heads, window)
    )
    parts = [window_logits.masked_fill(~is_seen_CWK.unsqueeze(1), float("-inf"))]
    entry_logits = None
    if entries_BGD is not None and entries_BGD.shape[1]:
        assert is_chosen_BTG is not None
        entry_logits = (q.reshape(batch, -1, dim) @ entries_BGD.mT).view(
            batch, pieces, heads, window, -1
        )
        is_chosen = cut_pieces(is_chosen_BTG, window).unsqueeze(2)
        parts.append(entry_logits.masked_fill(~is_chosen, float("-inf")))
    probabilities = _softmax_with_sink(parts, sink_H)
    mixed = probabilities[0].flatten(2, 3) @ keys
    if entries_BGD is not None and entry_logits is not None:
        flat = probabilities[1].reshape(batch, -1, entry_logits.shape[-1])
        mixed = mixed + (flat @ entries_BGD).view_as(mixed)
    output = mixed.unflatten(2, (heads, window)).transpose(2, 3).flatten(1, 2)[:, :tokens]
    return Attended(output, window_logits, entry_logits)


def _softmax_with_sink(parts: list[torch.Tensor], sink_H: torch.Tensor) -> list[torch.Tensor]:
    """Probabilities of each part [B, C, H, W, ...]; the sink [H] takes its share of them."""
    sink = sink_H.view(-1, 1, 1)
    padding = sink.new_full((1,), float("-inf")).expand(*sink.shape[:2], _SINK_COLUMNS - 1)
    columns = torch.cat([sink, padding], dim=-1).expand(*parts[0].shape[:-1], _SINK_COLUMNS)
    together = torch.softmax(torch.cat([*parts, columns], dim=-1), dim=-1)
    return list(together.split([*(part.shape[-1] for part in parts), _SINK_COLUMNS], dim=-1))
