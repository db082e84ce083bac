"""XXH3-64 of shards in tensors: the checksum of docs/formats/slot.md, for shards of any device.

    eight sums of 64 bits; of every 64 bytes (a stripe) each takes its 8 bytes, mixed with a part of
    the secret that moves on by 8 bytes a stripe; after 16 stripes the sums are scrambled, and the
    secret begins anew; the last 64 bytes are taken once more; then the sums are folded into one

The algorithm is that of xxHash 0.8 with its own secret and no seed, for more than 240 bytes. Here
only for whole stripes, which is what shards are. int64 stands for uint64: both wrap alike.
"""

import functools

import torch

STRIPE_BYTES = 64
LANES = 8
SECRET_STEP_BYTES = 8
STRIPES_PER_ROUND = 16
SHORTEST_BYTES = 256
"""Below, and for lengths that are not whole stripes, XXH3 is another function."""
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SCRAMBLE_SECRET_AT = 128
LAST_SECRET_AT = 121
MERGE_SECRET_AT = 11
PRIME32_1 = 0x9E3779B1
PRIME64_1 = 0x9E3779B185EBCA87
AVALANCHE_PRIME = 0x165667919E3779F9
FIRST_SUMS = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)


def check_rows(
    rows: torch.Tensor, row_ids: torch.Tensor, shards: torch.Tensor, shard_bytes: int
) -> None:
    """TypeError or ValueError unless these are arguments of `hash_shards`."""
    if (rows.dtype, row_ids.dtype, shards.dtype) != (torch.uint8, torch.int32, torch.int32):
        raise TypeError(
            f"rows, row_ids, shards: given {rows.dtype}, {row_ids.dtype} and {shards.dtype}, "
            "expected uint8, int32 and int32"
        )
    is_fit = (
        (rows.dim(), row_ids.dim(), shards.dim()) == (2, 1, 2)
        and shard_bytes >= SHORTEST_BYTES
        and shard_bytes % STRIPE_BYTES == 0
        and rows.shape[1] % shard_bytes == 0
        and len(row_ids) == len(shards)
    )
    if not is_fit:
        raise ValueError(
            f"rows, row_ids, shards, shard_bytes: given {list(rows.shape)}, "
            f"{list(row_ids.shape)}, {list(shards.shape)} and {shard_bytes}, expected "
            f"[rows, shards x S], [n], [n, wanted] and S, a multiple of {STRIPE_BYTES} from "
            f"{SHORTEST_BYTES} on"
        )
    tensors = {"rows": rows, "row_ids": row_ids, "shards": shards}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.device != rows.device:
            raise ValueError(
                f"{name}: given strides {tensor.stride()} on {tensor.device}, expected a "
                f"contiguous tensor on {rows.device}"
            )


def hash_shards(
    rows: torch.Tensor, row_ids: torch.Tensor, shards: torch.Tensor, shard_bytes: int
) -> torch.Tensor:
    """XXH3-64 of shards of some rows: int64 [n, wanted], the bits of the unsigned value.

    rows: uint8 [rows, shards x S]. row_ids: int32 [n]. shards: int32 [n, wanted], which shards of
    each row; what is below 0 is nothing, and its hash is 0.
    """
    check_rows(rows, row_ids, shards, shard_bytes)
    by_shard = rows.view(len(rows), -1, shard_bytes)
    found = by_shard[row_ids.long()[:, None], shards.long().clamp(min=0)]
    return torch.where(shards < 0, 0, _hash(found.view(torch.int64)))


def _hash(words: torch.Tensor) -> torch.Tensor:
    """Of int64 [..., words of a shard]."""
    stripes = words.unflatten(-1, (-1, LANES))
    shard_bytes = words.shape[-1] * 8
    # The last stripe is taken once more by itself, so it is not one of those before.
    count = stripes.shape[-2] - 1
    sums = torch.tensor([signed(one) for one in FIRST_SUMS], device=words.device)
    sums = sums.expand(*words.shape[:-1], LANES)
    for first in range(0, count, STRIPES_PER_ROUND):
        end = min(first + STRIPES_PER_ROUND, count)
        for stripe in range(first, end):
            secret = _secret_words((stripe - first) * SECRET_STEP_BYTES, words.device)
            sums = sums + _mix(stripes[..., stripe, :], secret)
        if end - first == STRIPES_PER_ROUND:
            secret = _secret_words(SCRAMBLE_SECRET_AT, words.device)
            sums = (sums ^ _shift_right(sums, 47) ^ secret) * PRIME32_1
    sums = sums + _mix(stripes[..., -1, :], _secret_words(LAST_SECRET_AT, words.device))
    pairs = (sums ^ _secret_words(MERGE_SECRET_AT, words.device)).unflatten(-1, (-1, 2))
    total = signed(shard_bytes * PRIME64_1) + _fold(pairs[..., 0], pairs[..., 1]).sum(-1)
    total = (total ^ _shift_right(total, 37)) * AVALANCHE_PRIME
    return total ^ _shift_right(total, 32)


def _mix(stripe: torch.Tensor, secret: torch.Tensor) -> torch.Tensor:
    """What a stripe adds to the sums: to each its neighbour's bytes, and its own ones multiplied
    half by half."""
    keyed = stripe ^ secret
    return stripe.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) + (
        (keyed & 0xFFFFFFFF) * _shift_right(keyed, 32)
    )


def _fold(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The two halves of the product of 128 bits, XORed."""
    a_low, a_high, b_low, b_high = (
        part for one in (a, b) for part in (one & 0xFFFFFFFF, _shift_right(one, 32))
    )
    low, crossed = a_low * b_low, a_high * b_low
    middle = (crossed & 0xFFFFFFFF) + _shift_right(low, 32) + a_low * b_high
    high = a_high * b_high + _shift_right(crossed, 32) + _shift_right(middle, 32)
    return high ^ (a * b)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """As of unsigned values."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def secret_word(at: int) -> int:
    """The 64 bits of the secret from a byte on."""
    return int.from_bytes(SECRET[at : at + 8], "little")


@functools.cache
def _secret_words(at: int, device: torch.device) -> torch.Tensor:
    words = [signed(secret_word(at + 8 * lane)) for lane in range(LANES)]
    return torch.tensor(words, device=device)
