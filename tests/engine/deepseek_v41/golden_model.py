"""DeepSeek's small V4.1 model: its weights in memory, and what its own code computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.models.deepseek_v41.build_weights import build_weights
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.weights import ModelWeights

from .borders import Tensors, measure_noise
from .model_bench import ModelBench


class Arrays:
    """Arrays of an .npz file, each read once."""

    def __init__(self, path: Path) -> None:
        self._file = np.load(path)
        self._read: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._read:
            self._read[name] = self._file[name]
        return self._read[name]


@dataclass(frozen=True, eq=False)
class GoldenModel:
    config: DeepseekV41Config
    tensors: Mapping[str, torch.Tensor]
    """As the file has them, of which `weights` are made."""
    weights: ModelWeights
    sequences: Arrays
    internals: Arrays
    extra: Arrays

    @property
    def engram_layers(self) -> tuple[int, ...]:
        assert self.config.engram is not None
        return self.config.engram.layer_ids

    def bench(self) -> ModelBench:
        compressed_ids_V = torch.from_numpy(self.sequences["engram_token_map"])
        return ModelBench.build(self.config, self.weights, compressed_ids_V)

    def noise(self, name: str) -> np.ndarray:
        """[T]: of each logits row, the larger of what the folder says and what is measured here."""
        ids = self.sequences[f"ids_{name}"].tolist()
        compressed_ids_V = torch.from_numpy(self.sequences["engram_token_map"])

        def compute(tensors: Tensors) -> torch.Tensor:
            weights = build_weights(self.config, tensors)
            bench = ModelBench.build(self.config, weights, compressed_ids_V)
            return bench.run(bench.begin(len(ids)), ids)

        known = torch.from_numpy(self.sequences[f"noise_{name}"])
        return torch.maximum(known, measure_noise(compute, self.tensors, draws=2)).numpy()
