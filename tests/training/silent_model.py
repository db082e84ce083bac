"""A folder with a model whose head is zero: every token takes what chance takes."""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.models.deepseek_v41.checkpoint.writer import write_folder
from engine.models.deepseek_v41.engram_vocabulary import compress_token_texts
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.shipped import shipped_config
from training.tokenizer import tokenizer_text


def write_silent_model(folder: Path, tokenizer: Tokenizer) -> None:
    """A v41-nano with this tokenizer, in a folder that is not there yet."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_text(tokenizer), encoding="utf-8")
    config = shipped_config("v41-nano")
    assert config.engram is not None
    vocabulary = tokenizer.get_vocab()
    spellings = sorted(vocabulary, key=vocabulary.__getitem__)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(len(spellings))]
    compressed = int(compress_token_texts(texts, spellings).max()) + 1
    config = replace(config, engram=replace(config.engram, compressed_vocabulary=compressed))
    tensors = random_tensors(config, torch.Generator().manual_seed(1))
    tensors["head.weight"] = torch.zeros_like(tensors["head.weight"])
    write_folder(folder, config, tensors)
