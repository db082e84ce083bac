"""The span of an image in the text: which position is what, and the embeddings in their order.

Every position of a span carries the id of the image token; what a position is follows from the grid
alone. Image tokens stand in reading order:

    start | token token ... token newline | ... | token token ... token newline | end
"""

from enum import IntEnum

import torch

from .image_size import Grid, span_tokens


class SpanPart(IntEnum):
    """What stands at a position of a span."""

    START = 0
    TOKEN = 1
    NEWLINE = 2
    END = 3


def plan_span(tokens: Grid) -> torch.Tensor:
    """`SpanPart` of each position: int64 [span]."""
    parts = torch.full((tokens.rows, tokens.columns + 1), SpanPart.TOKEN.value, dtype=torch.int64)
    parts[:, -1] = SpanPart.NEWLINE
    start = torch.tensor([SpanPart.START.value])
    end = torch.tensor([SpanPart.END.value])
    return torch.cat([start, parts.flatten(), end])


def fill_span(
    image_tokens: torch.Tensor,
    tokens: Grid,
    *,
    start_E: torch.Tensor,
    newline_E: torch.Tensor,
    end_E: torch.Tensor,
) -> torch.Tensor:
    """Embeddings [span, E] from image tokens [rows x columns, E] and the learned delimiters [E]."""
    rows = image_tokens.view(tokens.rows, tokens.columns, -1)
    newlines = newline_E.expand(tokens.rows, 1, -1)
    lines = torch.cat([rows, newlines], dim=1).flatten(0, 1)
    span = torch.cat([start_E[None], lines, end_E[None]])
    assert len(span) == span_tokens(tokens)
    return span
