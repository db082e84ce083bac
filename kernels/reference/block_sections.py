"""Copies one section of many blocks between a pool, which has block after block, and a staging
area, which has the section of one block after that of another.

    pool     uint8 [capacity, block bytes]: the section is columns offset .. offset + section bytes
    staging  uint8 [blocks, section bytes]: row i is the section of block block_ids[i]

Not for copies between two devices: a pool and its staging area are on the same one.
"""

import torch


def scatter_block_sections(
    staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor, offset_bytes: int
) -> None:
    """Write each row of `staging` into the section of its block; other bytes of the pool stay.

    `block_ids`: int32 or int64 [blocks], each a row of the pool and none named twice. That is for
    the caller to see to; an id that the pool does not have is an error of the device (IndexError on
    a CPU). All tensors are contiguous and on one device. Raises TypeError and ValueError for other
    types and shapes.
    """
    check_sections(staging, pool, block_ids, offset_bytes)
    section = pool[:, offset_bytes : offset_bytes + staging.shape[1]]
    section.index_copy_(0, block_ids.long(), staging)


def gather_block_sections(
    pool: torch.Tensor, block_ids: torch.Tensor, offset_bytes: int, staging: torch.Tensor
) -> None:
    """Fill each row of `staging` with the section of its block.

    It reads what `scatter_block_sections` writes. A block may be named more than
    once. Else as there.
    """
    check_sections(staging, pool, block_ids, offset_bytes)
    section = pool[:, offset_bytes : offset_bytes + staging.shape[1]]
    torch.index_select(section, 0, block_ids, out=staging)


def check_sections(
    staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor, offset_bytes: int
) -> None:
    """Raise TypeError or ValueError for arguments that do not fit; ids are not looked at."""
    for name, tensor in (("staging", staging), ("pool", pool)):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name}: given {tensor.dtype}, expected torch.uint8")
        if tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: given shape {list(tensor.shape)} with strides {list(tensor.stride())}, "
                "expected a contiguous matrix"
            )
    if block_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block ids: given {block_ids.dtype}, expected torch.int32 or torch.int64")
    if block_ids.shape != staging.shape[:1] or not block_ids.is_contiguous():
        raise ValueError(
            f"block ids: given shape {list(block_ids.shape)} with strides "
            f"{list(block_ids.stride())}, expected one for each of {len(staging)} rows of staging"
        )
    if not 0 <= offset_bytes <= pool.shape[1] - staging.shape[1]:
        raise ValueError(
            f"section: given bytes {offset_bytes} to {offset_bytes + staging.shape[1]}, expected "
            f"inside a block of {pool.shape[1]} bytes"
        )
    if not staging.device == pool.device == block_ids.device:
        raise ValueError(
            f"devices: given {staging.device} (staging), {pool.device} (pool), "
            f"{block_ids.device} (block ids), expected one"
        )
