"""A folder of v41-nano with random weights and a tokenizer that it could have been trained with."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from engine.models.deepseek_v41.checkpoint.writer import write_folder
from engine.models.deepseek_v41.engram_vocabulary import compress_token_texts
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.tokenizer_file import read_spellings
from engine.tokenizer import bytes_of_token

MINI = Path(__file__).resolve().parents[3] / "models" / "v41-mini"


def write_nano(folder: Path) -> Path:
    """Write the model; the tokenizer is that of v41-mini, cut off behind nano's vocabulary."""
    folder.mkdir()
    nano = shipped_config("v41-nano")
    assert nano.engram is not None
    _write_tokenizer(folder / "tokenizer.json", nano.vocabulary)
    spellings = read_spellings(folder / "tokenizer.json")
    spelled = [spellings[number] for number in range(nano.vocabulary)]
    ids = compress_token_texts([bytes_of_token(text) for text in spelled], spelled)
    engram = replace(nano.engram, compressed_vocabulary=int(ids.max()) + 1)
    config = replace(nano, engram=engram)
    tensors = random_tensors(config, torch.Generator().manual_seed(5))
    write_folder(folder, config, tensors, quantised=False)
    return folder


def _write_tokenizer(path: Path, vocabulary: int) -> None:
    document = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    kept = {text: number for text, number in model["vocab"].items() if number < vocabulary}
    model["vocab"] = kept
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in kept]
    document["added_tokens"] = [one for one in document["added_tokens"] if one["id"] < vocabulary]
    path.write_text(json.dumps(document), encoding="utf-8")
