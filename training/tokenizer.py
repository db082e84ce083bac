"""The byte-level BPE of `v41-mini`: trained once on the training side, kept as tokenizer.json.

    id      0    1    2    3 .. 258    259 .. 2045    2046   2047
            BOS  EOS  pad  the bytes   merges         image  noise

Text is cut as `engine.tokenizer` cuts it (each digit alone, then the words of GPT-2), and never
turns into a special token. Serving text with the model is the engine's part.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer

from .command import InvalidInput, reading

VOCABULARY = 2_048
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 0, 1, 2
IMAGE_TOKEN_ID, NOISE_TOKEN_ID = VOCABULARY - 2, VOCABULARY - 1

_FIRST_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
_LAST_SPECIAL = ("<|image|>", "<|noise|>")
SPECIAL_TOKEN_IDS = (BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, IMAGE_TOKEN_ID, NOISE_TOKEN_ID)


def train_tokenizer(texts: Iterable[str], *, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE of `vocabulary` tokens; the same texts give the same tokenizer.

    Raises InvalidInput if the texts are too few for so many merges.
    """
    tokenizer = Tokenizer(BPE())
    steps: list[PreTokenizer] = [
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    tokenizer.pre_tokenizer = PreTokenizers(steps)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary - len(_LAST_SPECIAL),
        special_tokens=list(_FIRST_SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(_LAST_SPECIAL))
    if tokenizer.get_vocab_size() != vocabulary:
        raise InvalidInput(
            "texts to train on",
            given=f"so few that {tokenizer.get_vocab_size()} tokens come of them",
            expected=f"{vocabulary} tokens",
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json; raises InvalidInput if it is none as described above."""
    expected = "the tokenizer.json that training.pack writes"
    with reading("tokenizer", path, expected=expected):
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    problem = _find_problem(tokenizer.get_vocab())
    if problem is not None:
        raise InvalidInput(f"tokenizer {path}", given=problem, expected=expected)
    # Not kept in the file: without it a text that names a special token would become one.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _find_problem(vocabulary: Mapping[str, int]) -> str | None:
    """What sets a vocabulary apart from one of `train_tokenizer`; None if nothing does."""
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if len(tokens) > VOCABULARY:
        return f"{len(tokens)} tokens, more than {VOCABULARY}"
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        return "a vocabulary that leaves ids out"
    first, last = len(_FIRST_SPECIAL), len(tokens) - len(_LAST_SPECIAL)
    if (*tokens[:first], *tokens[last:]) != (*_FIRST_SPECIAL, *_LAST_SPECIAL):
        return "other special tokens"
    if not set(ByteLevel.alphabet()).issuperset("".join(tokens[first:last])):
        return "a vocabulary that is not of bytes"
    return None


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """What tokenizer.json holds; equal tokenizers give equal texts."""
    return tokenizer.to_str(pretty=True) + "\n"


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
    """Ids of each text, uint16 [T], between BOS and EOS."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([BOS_TOKEN_ID, *e.ids, EOS_TOKEN_ID], np.uint16) for e in encodings]


def read_token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token stands for; none for special tokens."""
    # With it comes the tensor library, for which programs prepare their environment first.
    from engine.tokenizer import byte_alphabet

    alphabet = byte_alphabet()
    special = tokenizer.get_added_tokens_decoder().keys()
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return [
        b"" if index in special else bytes([alphabet[character] for character in token])
        for index, token in tokens
    ]
