"""What of the held-out side models are judged on: the same bytes for each of them.

A sample in the order of the paths' digests, which is fair and the same everywhere, with the start
of each file: a slow model then sees many files rather than one long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import Document, path_digest
from .ngram import byte_symbols
from .tokenizer import encode_documents, read_token_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Excerpt:
    """The start of a held-out file, or all of it.

    `ids`: int64 [1 + T], BOS and the T tokens that are judged; EOS is the last of them if the file
    is whole. `data`: the bytes of the same tokens.
    """

    path: str
    ids: NDArray[np.int64]
    data: bytes
    is_whole: bool

    @property
    def tokens(self) -> int:
        """Tokens that are judged."""
        return len(self.ids) - 1

    @property
    def byte_symbols(self) -> NDArray[np.int64]:
        """The same text as symbols of a byte model, with the end if the tokens have it."""
        return byte_symbols(self.data, has_end=self.is_whole)


def choose_documents(held_out: Sequence[Document], files: int) -> list[Document]:
    """At most `files` documents, in order of their paths' digests."""
    return list(islice(sorted(held_out, key=lambda d: path_digest(d.path)), files))


def cut_excerpts(
    documents: Sequence[Document], tokenizer: Tokenizer, *, tokens_max: int | None
) -> list[Excerpt]:
    """The first `tokens_max` tokens of each document, its end counted as one; None for all."""
    token_bytes = read_token_bytes(tokenizer)
    excerpts = []
    texts = [document.text for document in documents]
    for document, ids in zip(documents, encode_documents(tokenizer, texts), strict=True):
        kept = ids if tokens_max is None else ids[: 1 + tokens_max]
        excerpts.append(
            Excerpt(
                path=document.path,
                ids=kept.astype(np.int64),
                data=b"".join([token_bytes[token_id] for token_id in kept]),
                is_whole=len(kept) == len(ids),
            )
        )
    return excerpts
