"""From a training run to a model's folder, and back: weights as trained, config and tokenizer.

    python -m training.export --state OUT/state.pt --data FOLDER --model models/v41-mini

Weights are stored in the released formats (FP8 blocks, FP4 experts, FP8 n-gram rows, the rest BF16
or float32), to which training rounded them in every step: the folder holds the trained model, not
one near it.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engine.models.deepseek_v41.build_weights import dequantise
from engine.models.deepseek_v41.checkpoint.folder import open_folder
from engine.models.deepseek_v41.checkpoint.tensor_schema import Storage, scale_name, tensor_schema
from engine.models.deepseek_v41.checkpoint.writer import write_folder
from engine.models.deepseek_v41.config import DeepseekV41Config

from .command import InvalidInput, ending_in_one_line
from .compressed_ids import read_compressed_ids
from .mini_config import config_of_ids
from .parameters import shapes_of, stack_experts, unstack_experts
from .state_file import read_state

FOLDER_BYTES_MAX = 12_000_000
TOKENIZER_FILE = "tokenizer.json"


def stored_tensors(
    config: DeepseekV41Config, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors by their published names, ready to be quantised: float32, plain ones BF16."""
    schema = tensor_schema(config)
    return {
        name: tensor.bfloat16() if schema[name].storage is Storage.PLAIN else tensor.float()
        for name, tensor in unstack_experts(parameters).items()
    }


def export_model(
    config: DeepseekV41Config, parameters: Mapping[str, torch.Tensor], folder: Path
) -> int:
    """Write the folder, quantised; returns its size in bytes. Raises ModelFileError as the writer.

    A tokenizer.json that is there stays.
    """
    write_folder(folder, config, stored_tensors(config, parameters), quantised=True)
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def read_parameters(folder: Path, config: DeepseekV41Config) -> dict[str, torch.Tensor]:
    """What training goes on from: the folder's weights as float32, experts stacked.

    Raises what opening a folder raises, and InvalidInput if it holds a model of other sizes.
    """
    checkpoint = open_folder(folder)
    if checkpoint.config != config:
        given = "one of other sizes"
        raise InvalidInput(f"model {folder}", given=given, expected="those of training.mini_config")
    tensors = {}
    for name, spec in tensor_schema(config).items():
        tensors[name] = checkpoint.tensors[name]
        if scale_name(name) in checkpoint.tensors:
            scales = checkpoint.tensors[scale_name(name)]
            tensors[name] = dequantise(spec, tensors[name], scales)
    return stack_experts(tensors)


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a trained v41-mini as a model's folder.")
    parser.add_argument("--state", type=Path, required=True, help="state.pt of the run")
    parser.add_argument("--data", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--model", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(given)
    config = config_of_ids(read_compressed_ids(arguments.data))
    state = read_state(arguments.state, shapes_of(config))
    arguments.model.mkdir(parents=True, exist_ok=True)
    tokenizer = arguments.data / TOKENIZER_FILE
    shutil.copyfile(tokenizer, arguments.model / TOKENIZER_FILE)
    size_bytes = export_model(config, state["parameters"], arguments.model)
    print(f"{arguments.model}: {size_bytes:,} bytes of at most {FOLDER_BYTES_MAX:,}")
    if size_bytes > FOLDER_BYTES_MAX:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
