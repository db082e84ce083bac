"""Engram's smaller vocabulary: tokens that differ only in case, accents or spaces share an id.

The ids must be those that the tables were trained with. They follow from the tokenizer alone, and
their number is known from the configuration: another one means another tokenizer.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex
from tokenizers.normalizers import (
    NFD,
    NFKC,
    Lowercase,
    Normalizer,
    Replace,
    Strip,
    StripAccents,
)
from tokenizers.normalizers import Sequence as Normalizers

from ...errors import ModelFileError
from ...tokenizer import byte_alphabet, bytes_of_token
from .config import DeepseekV41Config
from .tokenizer_file import TOKENIZER_FILE, read_spellings

_UNDECODABLE = "\ufffd"
# The released rule passes a lone space through its last step as this character, so this character
# ends up as a space as well.
_KEPT_SPACE = "\ue000"

# The library's own steps, not Python's: they follow another version of Unicode and lowercase each
# character by itself.
_FOLDING: list[Normalizer] = [
    NFKC(),
    NFD(),
    StripAccents(),
    Lowercase(),
    Replace(Regex(r"[ \t\r\n]+"), " "),
]
_FOLD = Normalizers(_FOLDING)
_STRIP = Strip()

_CHARACTERS = {byte: character for character, byte in byte_alphabet().items()}


def compress_token_texts(
    texts: Sequence[bytes | str], spellings: Sequence[str] | None = None
) -> torch.Tensor:
    """The compressed id of each token, int64 [V]: numbered as they are first seen.

    texts: each token decoded by itself. What decodes to U+FFFD goes by its spelling in the
    vocabulary: `spellings`, one for each token, needed for such texts that are str; bytes are
    spelled as in a byte-level vocabulary. Raises ValueError for a text without the spelling it
    needs.
    """
    numbers: dict[str, int] = {}
    keys = (
        _key_of(text, spellings[index] if spellings is not None else None)
        for index, text in enumerate(texts)
    )
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def _key_of(text: bytes | str, spelling: str | None) -> str:
    decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
    if _UNDECODABLE not in decoded:
        # A text of which nothing is left, an accent for instance, stands for itself.
        return fold_text(decoded) or decoded
    if spelling is not None:
        return spelling
    if isinstance(text, str):
        raise ValueError(f"text {text!r}: expected its spelling in the vocabulary too")
    return "".join(_CHARACTERS[byte] for byte in text)


def fold_text(text: str) -> str:
    """NFKC, NFD, no accents, lower case, one space for white space, none at the ends.

    A text that is nothing but white space becomes one space.
    """
    folded = _FOLD.normalize_str(text)
    if folded == " ":
        return folded
    return _STRIP.normalize_str(folded).replace(_KEPT_SPACE, " ")


def read_compressed_ids(folder: Path, config: DeepseekV41Config) -> torch.Tensor:
    """The compressed id of every token id, int64 [vocabulary], by the folder's tokenizer.json.

    An id without a token, which no text has, counts as the pad token. A model without Engram needs
    no tokenizer here: its ids stay as they are. Raises MissingModel if there is no file, and
    ModelFileError if it is no tokenizer, or one of another vocabulary than the configuration's.
    """
    engram = config.engram
    if engram is None:
        return torch.arange(config.vocabulary)
    path = folder / TOKENIZER_FILE
    spellings = read_spellings(path)
    tokens = len(spellings)
    if not engram.pad_token_id < tokens <= config.vocabulary:
        expected = f"{engram.pad_token_id + 1} to {config.vocabulary}"
        raise ModelFileError(path, [f"given {tokens} tokens, expected {expected}"])
    if spellings.keys() != set(range(tokens)):
        raise ModelFileError(path, [f"given ids up to {max(spellings)} for {tokens} tokens"])
    spelled = [spellings[index] for index in range(tokens)]
    ids = compress_token_texts([bytes_of_token(spelling) for spelling in spelled], spelled)
    compressed = int(ids.max()) + 1
    if compressed != engram.compressed_vocabulary:
        expected = f"engram_compressed_vocab_size, {engram.compressed_vocabulary}"
        raise ModelFileError(path, [f"given {compressed} compressed ids, expected {expected}"])
    return torch.cat([ids, ids[engram.pad_token_id].repeat(config.vocabulary - tokens)])
