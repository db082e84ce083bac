"""A model small enough to train in a test: every kind of layer, no vision."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.shipped import shipped_config
from training.parameters import stack_experts
from training.positions import Positions
from training.steps import Geometry

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Nano:
    config: DeepseekV41Config
    tensors: dict[str, torch.Tensor]
    """By their published names, as a checkpoint has them."""
    compressed_ids_V: torch.Tensor

    def parameters(self) -> dict[str, torch.Tensor]:
        """Fresh copies, float32, that ask for gradients."""
        copies = {name: tensor.clone() for name, tensor in stack_experts(self.tensors).items()}
        return {name: tensor.requires_grad_() for name, tensor in copies.items()}

    def positions(self, tokens: int) -> Positions:
        return Positions(self.config, tokens, CPU, self.compressed_ids_V)

    def geometry(self, batch: int, tokens: int) -> Geometry:
        return Geometry(config=self.config, positions=self.positions(tokens), batch=batch)


def nano(seed: int = 11) -> Nano:
    config = replace(shipped_config("v41-nano"), vision=None, image_token_id=None)
    assert config.engram is not None
    ids = torch.arange(config.vocabulary) % config.engram.compressed_vocabulary
    return Nano(config, random_tensors(config, torch.Generator().manual_seed(seed)), ids)


def random_ids(config: DeepseekV41Config, batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """int64 [batch, tokens], with stretches that come again."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config.vocabulary - 2, (batch, tokens), generator=generator)
    third = tokens // 3
    ids[:, third : 2 * third] = ids[:, :third]
    return ids
