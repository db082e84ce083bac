"""tokenizer.json of a model folder, read with care: which tokens there are, and how text is cut.

The file is not given to the tokenizers library: a merge, a normaliser or a decoder that makes no
sense ends the process there, or never ends. What it says is checked here, and what is not known
here is refused. An expression that cuts text is the model's own program: it has to be one that is
known to the library, and how long it takes is not checked.
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Regex

from ...errors import ModelFileError
from ...tokenizer import Cut, TokenizerData, find_vocabulary_problems
from .config import DeepseekV41Config
from .json_file import read_json

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_BYTES_MAX = 32 << 20
"""A few times what a vocabulary of 129,280 tokens and its merges take."""
CUTS_MAX = 16
PATTERN_CHARACTERS_MAX = 4096

_SURROGATES = re.compile("[\ud800-\udfff]")


def read_spellings(path: Path) -> dict[int, str]:
    """Each token's spelling by its id, of a byte-level tokenizer.json.

    Raises MissingModel if there is no file, ModelFileError if it is no tokenizer.
    """
    return _spellings_of(path, read_json(path, bytes_max=TOKENIZER_BYTES_MAX))


def read_text_tokenizer(folder: Path, config: DeepseekV41Config) -> TokenizerData:
    """What makes ids of text and text of ids, for a model with these special tokens.

    Texts begin with the BOS token. Raises as `read_spellings`, with everything that is wrong.
    """
    path = folder / TOKENIZER_FILE
    document = read_json(path, bytes_max=TOKENIZER_BYTES_MAX)
    spellings = _spellings_of(path, document)
    tokens = [spellings[index] for index in sorted(spellings)]
    if max(spellings, default=-1) != len(tokens) - 1:
        raise ModelFileError(path, [f"given ids up to {max(spellings)} for {len(tokens)} tokens"])
    model, added = document["model"], document["added_tokens"]
    problems = list(_model_problems(document))
    if not config.eos_token_id < len(tokens) <= config.vocabulary:
        expected = f"{config.eos_token_id + 1} to {config.vocabulary}"
        problems.append(f"given {len(tokens)} tokens, expected {expected}")
    merges = _merges_of(model.get("merges"), problems)
    cuts = _cuts_of(document.get("pre_tokenizer"), problems)
    added_ids = {token["id"] for token in added}
    problems += find_vocabulary_problems(
        tokens, [index in added_ids for index in range(len(tokens))], merges
    )
    if problems:
        raise ModelFileError(path, problems)
    return TokenizerData(
        tokens=tokens,
        merges=merges,
        special_ids={token["content"]: token["id"] for token in added if token.get("special")},
        end_id=config.eos_token_id,
        chat_template="",
        begin_id=config.bos_token_id,
        cuts=cuts,
        unnamed_ids=config.vocabulary - len(tokens),
    )


def _spellings_of(path: Path, document: dict[str, Any]) -> dict[int, str]:
    decoder, model = document.get("decoder"), document.get("model")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise ModelFileError(path, ["no tokenizer of bytes: expected a decoder, ByteLevel"])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = document.get("added_tokens")
    if not isinstance(vocabulary, dict) or not isinstance(added, list):
        raise ModelFileError(path, ["no tokenizer: expected model.vocab and added_tokens"])
    if not all(isinstance(token, dict) for token in added):
        raise ModelFileError(path, ["no tokenizer: expected objects in added_tokens"])
    spellings: dict[int, str] = {}
    named = ((token.get("content"), token.get("id")) for token in added)
    for spelling, index in chain(vocabulary.items(), named):
        if not _is_text(spelling) or not _is_id(index):
            raise ModelFileError(path, ["no tokenizer: expected texts, each with an id"])
        if spellings.setdefault(index, spelling) != spelling:
            raise ModelFileError(path, [f"two tokens have the id {index}"])
    return spellings


def _is_text(value: object) -> bool:
    # JSON can hold halves of a surrogate pair.
    return isinstance(value, str) and not _SURROGATES.search(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _model_problems(document: dict[str, Any]) -> Iterator[str]:
    """Settings under which text would become other ids than by plain byte-level BPE."""
    model = document["model"]
    if model.get("type") != "BPE":
        yield f"model.type: given {model.get('type')!r}, expected 'BPE'"
    for name in (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    ):
        if model.get(name):
            yield f"model.{name}: given {model[name]!r:.60}, expected none"
    normalizer = document.get("normalizer")
    if normalizer not in (None, {"type": "Sequence", "normalizers": []}):
        yield f"normalizer: given {normalizer!r:.60}, expected none"


def _merges_of(value: object, problems: list[str]) -> list[tuple[str, str]]:
    """Pairs, which files of an older kind have as texts with a space between."""
    merges = []
    for merge in value if isinstance(value, list) else [value]:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_text, pair)):
            problems.append(f"model.merges: given {merge!r:.60}, expected pairs of tokens")
            return []
        merges.append((pair[0], pair[1]))
    return merges


def _cuts_of(value: object, problems: list[str]) -> tuple[Cut, ...]:
    """The steps before BPE; the last one makes characters of bytes."""
    steps = value.get("pretokenizers") if isinstance(value, dict) else None
    steps = [value] if steps is None else steps
    cuts = []
    if isinstance(steps, list) and len(steps) > CUTS_MAX:
        problems.append(f"pre_tokenizer: given {len(steps)} steps, expected at most {CUTS_MAX}")
        return ()
    for step in steps if isinstance(steps, list) else []:
        cut = _cut_of(step) if isinstance(step, dict) else None
        if cut is None:
            problems.append(f"pre_tokenizer: given {step!r:.200}, expected another step")
            return ()
        cuts.append(cut)
    if [cut.is_last for cut in cuts] != [False] * (len(cuts) - 1) + [True]:
        problems.append(
            "pre_tokenizer: expected steps of which the last is ByteLevel, and no other"
        )
    return tuple(cuts)


def _cut_of(step: dict[str, Any]) -> Cut | None:
    """None for a step that is not known here."""
    kind = step.get("type")
    if kind == "Digits":
        return Cut("digit" if step.get("individual_digits") else "digits")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return Cut("words" if step.get("use_regex", True) else "bytes")
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    is_plain = step.get("behavior") == "Isolated" and not step.get("invert")
    if kind != "Split" or not is_plain or not isinstance(expression, str):
        return None
    is_sound = len(expression) <= PATTERN_CHARACTERS_MAX and _is_text(expression)
    return Cut("pattern", expression) if is_sound and _is_expression(expression) else None


def _is_expression(text: str) -> bool:
    try:
        Regex(text)
    except Exception:
        # The library has no error of its own for it.
        return False
    return True
