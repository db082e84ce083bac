"""From a folder to a model that runs: config, weights and the vocabulary of Engram."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.operations import Operations

from ...block_pool import BlockPool
from ...errors import InvalidRequest, ModelFileError
from ...threads import find_environment_problem
from .checkpoint.folder import Checkpoint, build_checked, open_folder
from .checkpoint.tensor_checks import find_value_problems
from .config import DeepseekV41Config
from .engram_vocabulary import read_compressed_ids
from .model import DeepseekV41
from .vision import VisionEncoder, build_vision
from .vision.weights import vision_schema
from .weights import ModelWeights


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """Everything of a model but the memory that its sequences live in.

    `compressed_ids_V`: Engram's id of each token, int64 [V].
    """

    config: DeepseekV41Config
    weights: ModelWeights
    compressed_ids_V: torch.Tensor

    def build(self, pool: BlockPool, operations: Operations | None = None) -> DeepseekV41:
        """The model with its blocks in `pool`, run by `operations` (None for the reference)."""
        return DeepseekV41(
            self.config,
            self.weights,
            compressed_ids_V=self.compressed_ids_V,
            pool=pool,
            operations=operations,
        )


def load_model(path: str | Path) -> LoadedModel:
    """Read a folder with config.json, weights and, for Engram, tokenizer.json.

    Warns (RuntimeWarning) if the environment lets bits depend on the number of threads
    (`engine.threads.prepare_environment`). Raises MissingModel, or ModelFileError with everything
    that is wrong with the headers; only then with the tokenizer, and at last, as it takes longest,
    with the values.
    """
    return load_checkpoint(open_folder(path))


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """As `load_model`, of a folder that is open; the weights in `dtype` on `device`."""
    problem = find_environment_problem()
    if problem is not None:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
    config = checkpoint.config
    compressed_ids_V = read_compressed_ids(checkpoint.path, config)
    return LoadedModel(config, build_checked(checkpoint, dtype, device=device), compressed_ids_V)


def load_vision(path: str | Path) -> VisionEncoder:
    """The image encoder and aligner of a folder; a part of its own, which text does not need.

    Raises as `load_model`, and InvalidRequest for a model without one.
    """
    checkpoint = open_folder(path)
    if checkpoint.config.vision is None:
        raise InvalidRequest("model", given=str(path), expected="one with a vision_config")
    tensors = {name: checkpoint.tensors[name] for name in vision_schema(checkpoint.config)}
    problems = find_value_problems(tensors)
    if problems:
        raise ModelFileError(checkpoint.path, problems)
    return build_vision(checkpoint.config, tensors)
