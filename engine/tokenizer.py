"""Text to token ids and back, from the vocabulary and merges of a model.

Text never turns into a special token: those go in by id only, so a user who types "<|im_end|>"
gets the characters, not the end of a turn. Which ids stand around a message is in `chat`.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tokenizers import Regex
from tokenizers import Tokenizer as TextTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from kvstore.errors import shown

from .errors import InvalidRequest
from .models.gguf_file import GgufFile

NORMAL = 1
CONTROL = 3
"""Token types in GGUF files: text, and special tokens. Others need rules this tokenizer lacks."""

END_OF_TEXT_NAMES = ("<|im_end|>", "<|endoftext|>")
"""Special tokens that end an answer, besides the end-of-sequence token the file names."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A step by which text is cut before BPE, which joins nothing over a cut.

    `digit`: each digit alone; `digits`: runs of them. `pattern`: what the expression finds. `words`
    (by GPT-2's expression) and `bytes` (no cut) make characters of bytes, and come last.
    """

    kind: Literal["digit", "digits", "pattern", "words", "bytes"]
    pattern: str = ""

    @property
    def is_last(self) -> bool:
        return self.kind in ("words", "bytes")


SMOLLM_CUTS = (Cut("digit"), Cut("words"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerData:
    """What a model says of its tokenizer.

    `tokens[i]` is token i in the printable alphabet of byte-level BPE, `merges` are pairs in order
    of rank, `special_ids` the control tokens by name.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]
    special_ids: dict[str, int]
    end_id: int
    chat_template: str
    """Empty for a model that is not asked in turns but goes on with a text."""
    begin_id: int | None = None
    """The token that a plain text begins with, None if there is none."""
    cuts: tuple[Cut, ...] = SMOLLM_CUTS
    unnamed_ids: int = 0
    """Ids after the tokens that stand for nothing: the model has rows for them."""

    @property
    def sha256(self) -> str:
        """Hex fingerprint of all that decides how text becomes ids."""
        members = {
            "algorithm": _algorithm_name(self.cuts),
            "merges": self.merges,
            "special": sorted(self.special_ids.items()),
            "tokens": self.tokens,
        }
        text = json.dumps(members, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _algorithm_name(cuts: tuple[Cut, ...]) -> str:
    if cuts == SMOLLM_CUTS:
        return "byte-level BPE, digits alone"
    return f"byte-level BPE, {json.dumps([[cut.kind, cut.pattern] for cut in cuts])}"


def read_tokenizer(file: GgufFile) -> TokenizerData:
    """Tokenizer data from the metadata; problems are noted on the file."""
    fixed = {"model": "gpt2", "pre": "smollm", "add_bos_token": False}
    for name, expected in fixed.items():
        given = file.metadata.get(f"tokenizer.ggml.{name}", False if expected is False else None)
        if given != expected:
            file.problems.append(f"tokenizer.ggml.{name}: given {given!r}, expected {expected!r}")
    tokens: list[str] = file.read("tokenizer.ggml.tokens", list)
    types: list[int] = file.read("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in file.read("tokenizer.ggml.merges", list)]
    end_id: int = file.read("tokenizer.ggml.eos_token_id", int)
    file.problems += _type_problems(tokens, types)
    is_special = [kind != NORMAL for kind in types]
    file.problems += find_vocabulary_problems(tokens, is_special, merges)
    if not 0 <= end_id < len(tokens):
        file.problems.append(f"tokenizer: eos_token_id {end_id} is not one of {len(tokens)} tokens")
    return TokenizerData(
        tokens=tokens,
        merges=[(merge[0], merge[-1]) for merge in merges],
        special_ids={
            token: index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == CONTROL
        },
        end_id=end_id,
        chat_template=file.read("tokenizer.chat_template", str, ""),
    )


def _type_problems(tokens: list[str], types: list[int]) -> list[str]:
    problems = []
    if len(types) != len(tokens):
        problems.append(f"tokenizer: {len(types)} token types for {len(tokens)} tokens")
    foreign = sorted(set(types) - {NORMAL, CONTROL})
    if foreign:
        problems.append(f"tokenizer: token types {foreign}, expected only {NORMAL} and {CONTROL}")
    return problems


def find_vocabulary_problems(
    tokens: list[str], is_special: list[bool], merges: Sequence[tuple[str, ...]]
) -> list[str]:
    """What byte-level BPE cannot work with, in words: the library ends the process for some."""
    problems = []
    twice = len(tokens) - len(set(tokens))
    if twice:
        problems.append(f"tokenizer: {twice} tokens stand there twice")
    texts = [token for token, special in zip(tokens, is_special, strict=False) if not special]
    # Else a text could become a special token.
    known = set(texts)
    unusable = [
        merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= known
    ]
    if unusable:
        problems.append(f"tokenizer: {len(unusable)} merges of unknown tokens, as {unusable[0]}")
    strange = [token for token in texts if not byte_alphabet().keys() >= set(token)]
    if strange:
        problems.append(f"tokenizer: {len(strange)} tokens are not byte-level, as {strange[0]!r}")
    return problems


class Tokenizer:
    """Byte-level BPE. Loses nothing but special tokens."""

    def __init__(self, data: TokenizerData) -> None:
        self.data = data
        self.vocabulary = len(data.tokens) + data.unnamed_ids
        names = [name for name in END_OF_TEXT_NAMES if name in data.special_ids]
        self.stop_ids = frozenset([data.end_id, *(data.special_ids[name] for name in names)])
        vocabulary = {token: index for index, token in enumerate(data.tokens)}
        self._text_tokenizer = TextTokenizer(BPE(vocabulary, data.merges))
        self._text_tokenizer.pre_tokenizer = PreTokenizers([_step_of(cut) for cut in data.cuts])
        special = frozenset(data.special_ids.values())
        self._bytes = [
            b"" if index in special else bytes_of_token(token)
            for index, token in enumerate(data.tokens)
        ]
        self._bytes += [b""] * data.unnamed_ids

    @property
    def token_bytes_max(self) -> int:
        """Of text: those of no token are more."""
        return max(map(len, self._bytes))

    def encode(self, text: str) -> list[int]:
        """Ids of the text, none of them special."""
        return self._text_tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text; special tokens give nothing, bytes that are no UTF-8 give U+FFFD."""
        data = b"".join([self._bytes[token_id] for token_id in token_ids])
        return data.decode(errors="replace")

    def special_id(self, name: str) -> int:
        """Id of a special token; raises InvalidRequest if the model has none of that name."""
        if name not in self.data.special_ids:
            raise InvalidRequest(
                "special token",
                given=shown(name),
                expected=f"one of {sorted(self.data.special_ids)}",
            )
        return self.data.special_ids[name]

    def text_stream(self) -> "TextStream":
        return TextStream(self._bytes)


def _step_of(cut: Cut) -> PreTokenizer:
    if cut.kind == "pattern":
        return Split(Regex(cut.pattern), behavior="isolated")
    if cut.is_last:
        return ByteLevel(add_prefix_space=False, use_regex=cut.kind == "words")
    return Digits(individual_digits=cut.kind == "digit")


class TextStream:
    """Decodes token by token; the pieces joined are `decode` of all ids."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; empty within a character of several tokens."""
        return self._decoder.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._decoder.decode(b"", final=True)


def bytes_of_token(spelling: str) -> bytes:
    """What a token stands for: one whose characters are not of bytes, for itself."""
    alphabet = byte_alphabet()
    if all(character in alphabet for character in spelling):
        return bytes(alphabet[character] for character in spelling)
    return spelling.encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2).

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
