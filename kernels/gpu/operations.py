"""The back end for a GPU with compiled kernels for the bytes of cache rows, as a value.

Bytes and numbers are those of `kernels.cuda.operations`, which has a chain of PyTorch's operations
where this has one kernel: a sequence goes on with either where it was with the other.
"""

import dataclasses
from functools import partial

import torch

from ..cuda import index_scores, sparse_attention
from ..cuda.operations import CUDA_OPERATIONS
from . import index_entries, main_entries, window_rows

COMPILED_OPERATIONS = dataclasses.replace(
    CUDA_OPERATIONS,
    quantise_window_rows=window_rows.quantise_window_rows,
    dequantise_window_rows=window_rows.dequantise_window_rows,
    quantise_main_entries=main_entries.quantise_main_entries,
    dequantise_main_entries=main_entries.dequantise_main_entries,
    quantise_index_entries=index_entries.quantise_index_entries,
    dequantise_index_entries=index_entries.dequantise_index_entries,
    round_index_entries=index_entries.round_index_entries,
    score_entries=partial(
        index_scores.score_entries, unpack=index_entries.dequantise_index_entries
    ),
    score_candidates=partial(
        index_scores.score_candidates, unpack=index_entries.dequantise_index_entries
    ),
    sparse_attention=partial(
        sparse_attention.sparse_attention, unpack=main_entries.dequantise_main_entries
    ),
)


def compile_ahead(device: torch.device, *, entry_channels: int, index_channels: int) -> None:
    """Compile the kernels of a model whose window rows and main entries have `entry_channels`, and
    run each of them once: a pass is not to wait for a compiler, nor to be the first to find that
    there is none.

    Six kernels, each in the time that `compiler.launcher` says. Raises RuntimeError or OSError if
    one cannot be compiled or run.
    """
    entry = torch.zeros(1, entry_channels, device=device)
    key = torch.zeros(1, index_channels, device=device)
    operations = COMPILED_OPERATIONS
    operations.dequantise_window_rows(operations.quantise_window_rows(entry))
    operations.dequantise_main_entries(operations.quantise_main_entries(entry))
    operations.dequantise_index_entries(*operations.quantise_index_entries(key))
    torch.cuda.synchronize(device)
