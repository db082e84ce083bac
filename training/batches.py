"""Training sequences: windows at random places of the packed corpus, held on the device."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .command import InvalidInput
from .corpus import Side
from .packed_corpus import PackedSide, read_packed_side


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """Documents one after the other, as `training.pack` writes them: BOS, tokens, EOS.

    `ids` int64 [N] on the device; `text_bytes`: bytes of the documents' texts.
    """

    ids: torch.Tensor
    text_bytes: int

    def windows(self, starts_B: torch.Tensor, tokens: int) -> torch.Tensor:
        """ids int64 [B, tokens] from each of the starts."""
        steps = torch.arange(tokens, device=self.ids.device)
        return self.ids[starts_B.to(self.ids.device).unsqueeze(-1) + steps]

    def sample(self, batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Windows int64 [B, tokens] at random places; they may run over the end of a document."""
        starts = torch.randint(len(self.ids) - tokens + 1, (batch,), generator=generator)
        return self.windows(starts, tokens)

    def spread(self, count: int, tokens: int) -> torch.Tensor:
        """Windows int64 [count, tokens] at even distances: the same in every call."""
        starts = torch.linspace(0, len(self.ids) - tokens, count, dtype=torch.float64)
        return self.windows(starts.round().long(), tokens)

    def bits_per_byte(self, nats_per_token: float) -> float:
        """BOS and EOS count as tokens to be guessed but not as bytes of text."""
        return nats_per_token / float(np.log(2)) * len(self.ids) / self.text_bytes


def read_streams(
    pack: Path, device: torch.device, *, vocabulary: int, tokens_min: int
) -> tuple[TokenStream, TokenStream]:
    """The training and the held-out side of a packed corpus.

    Raises as `read_packed_side`, and InvalidInput for a side of fewer tokens or with other ids than
    those of the vocabulary.
    """
    streams = []
    for side in (Side.TRAINING, Side.HELD_OUT):
        packed = read_packed_side(pack, side)
        tokens, size_bytes = len(packed.ids), int(packed.sizes_bytes.sum())
        if tokens < tokens_min or size_bytes <= 0 or packed.ids.max() >= vocabulary:
            top = packed.ids.max(initial=0)
            raise InvalidInput(
                f"packed corpus {pack}, {side.value} side",
                given=f"{tokens} tokens of {size_bytes} bytes with ids up to {top}",
                expected=f"{tokens_min} tokens or more with ids below {vocabulary}",
            )
        streams.append(_stream_of(packed, device))
    return streams[0], streams[1]


def _stream_of(packed: PackedSide, device: torch.device) -> TokenStream:
    ids = torch.from_numpy(packed.ids.astype(np.int64)).to(device)
    return TokenStream(ids, int(packed.sizes_bytes.sum()))
