"""The bytes of a block stand where the layout says, and the namespace names all that matters."""

import struct

import pytest
import torch

from engine.block_pool import BlockPool
from engine.layout import KVGeometry, block_layout, model_namespace
from engine.paged_kv import GatherBuffer, PagedKV
from kvstore.key import Namespace

SMOLLM2 = KVGeometry(layers=30, kv_heads=3, head_dim=64)
SMALL = KVGeometry(layers=3, kv_heads=2, head_dim=8)


def test_block_of_smollm2_has_the_bytes_of_the_design() -> None:
    layout = block_layout(SMOLLM2)
    assert layout.block_bytes == 30 * 2 * 3 * 64 * 128 * 2 == 2_949_120
    assert [section.bytes for section in layout.sections] == [98_304] * 30


def test_block_bytes_are_in_order_of_layer_kv_head_token_dim() -> None:
    pool = BlockPool(block_bytes=SMALL.block_bytes, capacity_blocks=1)
    block_ids = pool.allocate(1)
    kv = PagedKV(pool, block_ids, GatherBuffer(SMALL, blocks_max=1))
    numbers = torch.arange(128 * 2 * 8).view(128, 2, 8) % 251
    for layer in range(SMALL.layers):
        kv.write(layer, 0, numbers + layer, -(numbers + layer))

    buffer = pool.buffer(block_ids[0])
    for layer, is_v, head, token, dim in [(0, 0, 0, 0, 0), (1, 0, 1, 77, 3), (2, 1, 1, 127, 7)]:
        index = (((layer * 2 + is_v) * 2 + head) * 128 + token) * 8 + dim
        # A bfloat16 is the upper half of a float32.
        (value,) = struct.unpack("<f", b"\x00\x00" + bytes(buffer[2 * index : 2 * index + 2]))
        expected = (numbers[token, head, dim].item() + layer) * (-1 if is_v else 1)
        assert value == expected


@pytest.mark.parametrize(
    "change",
    [
        {"weights_sha256": "1" * 64},
        {"tokenizer_sha256": "1" * 64},
        {"compute": "bfloat16"},
        {"tenant": "other"},
        {"name": "other"},
        {"layout": block_layout(SMOLLM2)},
    ],
)
def test_namespace_differs_when_anything_differs(change: dict[str, str]) -> None:
    facts = {
        "name": "m",
        "weights_sha256": "0" * 64,
        "compute": "float32",
        "tokenizer_sha256": "0" * 64,
        "layout": block_layout(SMALL),
        "tenant": "default",
    }

    def namespace(**parts: object) -> Namespace:
        return model_namespace(**parts)  # type: ignore[arg-type]

    assert namespace(**facts).namespace_id != namespace(**(facts | change)).namespace_id


def test_namespace_takes_a_model_name_of_any_length() -> None:
    namespace = model_namespace(
        name="鲸" * 5000,
        weights_sha256="0" * 64,
        compute="float32",
        tokenizer_sha256="0" * 64,
        layout=block_layout(SMALL),
        tenant="default",
    )
    assert namespace.model == "鲸" * 256
