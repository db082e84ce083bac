"""What clients tell nodes of themselves: right, short, anonymous, and in nobody's way."""

import asyncio
import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingStoreClient, StoreClient, notes
from kvstore.client.notes import (
    NAMESPACES_PER_NOTE_MAX,
    OTHER_LABEL,
    NoteBook,
    label_of,
)
from kvstore.client.results import FetchEnd, FetchResult
from kvstore.key import Namespace
from kvstore.layout import BlockLayout, Section
from kvstore.node.notes import ClientNotes
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S

LAYOUT = BlockLayout((Section("all", 1024),))


def namespace(model: str = "model", tenant: str = "default") -> Namespace:
    return Namespace(model=model, weights="w", tokenizer="t", layout=LAYOUT, tenant=tenant)


def taken(book: NoteBook) -> dict[str, Any]:
    """What a node makes of the book's note."""
    node = ClientNotes()
    node.add(book.take())
    return node.describe()


def fetched(blocks: int, ended: FetchEnd, rejected_shards: int = 0) -> FetchResult:
    return FetchResult(
        blocks=blocks, ended=ended, rejected_shards=rejected_shards, elapsed_s=0.0015
    )


def test_book_counts_tokens_by_namespace_and_reason() -> None:
    book, one, other = NoteBook(), namespace(), namespace(tenant="other")
    assert book.is_empty
    book.note_match(one, asked=10, matched=7, elapsed_s=0.001)
    book.note_fetch(one, asked=7, result=fetched(7, FetchEnd.COMPLETE))
    book.note_fetch(one, asked=7, result=fetched(5, FetchEnd.DEADLINE))
    book.note_fetch(other, asked=4, result=fetched(1, FetchEnd.TOO_FEW_SHARDS))
    book.note_fetch(other, asked=4, result=fetched(0, FetchEnd.TOO_FEW_SHARDS, rejected_shards=2))
    book.note_decode(0.0004)
    found = taken(book)
    assert found["namespaces"] == {
        label_of(one): {
            **{"matched_tokens": 7 * 128, "hit_tokens": 12 * 128},
            "miss_tokens": {
                **{"not_stored": 3 * 128, "too_few_shards": 0, "rejected": 0},
                "deadline": 2 * 128,
            },
        },
        label_of(other): {
            **{"matched_tokens": 0, "hit_tokens": 128},
            "miss_tokens": {
                **{"not_stored": 0, "too_few_shards": 3 * 128, "rejected": 4 * 128},
                "deadline": 0,
            },
        },
    }
    latency = found["client_latency"]
    assert {stage: sum(one["counts"]) for stage, one in latency.items()} == {
        **{"match": 1, "fetch": 4, "decode": 1}
    }
    assert latency["fetch"]["sum_s"] == pytest.approx(0.006)
    assert book.is_empty
    assert taken(book)["namespaces"] == {}


def test_longest_note_fits_and_no_token_is_lost() -> None:
    book = NoteBook()
    for i in range(3 * NAMESPACES_PER_NOTE_MAX):
        name = namespace(model="\N{OLD PERSIAN SIGN A}" * 60, tenant=str(i))
        for _ in range(3):
            book.note_match(name, asked=1 << 40, matched=1 << 39, elapsed_s=1e9)
            book.note_fetch(name, asked=1 << 40, result=fetched(1 << 38, FetchEnd.DEADLINE))
    document = book.take()
    assert len(document) <= wire.NOTE_BYTES_MAX
    found = json.loads(document)["namespaces"]
    assert len(found) == NAMESPACES_PER_NOTE_MAX + 1
    matched = sum(one["matched_tokens"] for one in found.values())
    assert matched == 9 * NAMESPACES_PER_NOTE_MAX * 128 << 39
    assert found[OTHER_LABEL]["matched_tokens"] == 6 * NAMESPACES_PER_NOTE_MAX * 128 << 39


def test_label_names_the_model_and_no_tenant() -> None:
    secret = namespace(model="some\nmodel", tenant="salt-of-a-tenant")
    assert label_of(secret) == f"some?model#{secret.namespace_id[:4].hex()}"
    assert label_of(secret) != label_of(namespace(model="some\nmodel"))


def blocks_for(request: pytest.FixtureRequest, count: int) -> RandomBlocks:
    seed = zlib.crc32(request.node.nodeid.encode())
    return RandomBlocks(
        count, block_bytes=1024, seed=seed, tenant=f"{os.getpid()}-{request.node.name}"
    )


def total_of(reports: list[Any], label: str) -> dict[str, Any]:
    """What all nodes together were told of a namespace."""
    noted = [report.statistics["namespaces"].get(label) for report in reports]
    (only,) = [one for one in noted if one is not None]
    assert isinstance(only, dict)
    return only


async def test_nodes_are_told_what_a_client_saw_when_it_ends(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 6)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys[:4], blocks.sources[:4])
        matched = await store.match(blocks.namespace, blocks.keys)
        target = blocks.empty_target()
        await store.fetch(blocks.namespace, blocks.keys[:matched], target.blocks[:matched])
    async with StoreClient.connect(cluster_path) as store:
        found = total_of(await store.node_reports(), label_of(blocks.namespace))
    assert (found["matched_tokens"], found["hit_tokens"]) == (4 * 128, 4 * 128)
    assert found["miss_tokens"]["not_stored"] == 2 * 128


async def test_nodes_are_told_now_and_then(
    cluster_path: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "NOTE_INTERVAL_S", 0.05)
    blocks = blocks_for(request, 3)
    async with StoreClient.connect(cluster_path) as store:
        await store.match(blocks.namespace, blocks.keys)
        async with asyncio.timeout(PATIENCE_S):
            while not any(
                label_of(blocks.namespace) in report.statistics["namespaces"]
                for report in await store.node_reports()
            ):
                await asyncio.sleep(0.02)


def test_blocking_client_tells_too(cluster_path: str, request: pytest.FixtureRequest) -> None:
    blocks = blocks_for(request, 3)
    with BlockingStoreClient(cluster_path) as store:
        store.match(blocks.namespace, blocks.keys)
    with BlockingStoreClient(cluster_path) as store:
        found = total_of(store.node_reports(), label_of(blocks.namespace))
    assert found["miss_tokens"]["not_stored"] == 3 * 128


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_client_ends_when_the_nodes_it_would_tell_are_gone(
    tmp_path: Path, request: pytest.FixtureRequest, number: signal.Signals
) -> None:
    blocks = blocks_for(request, 3)
    with LocalCluster.start(
        tmp_path / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20
    ) as cluster:
        store = BlockingStoreClient(cluster.cluster_path)
        store.match(blocks.namespace, blocks.keys)
        for node in store.map.nodes:
            cluster.kill(node.name, number)
        store.close()
        if number is signal.SIGSTOP:
            for node in store.map.nodes:
                cluster.kill(node.name, signal.SIGCONT)


@pytest.mark.usefixtures("patient_inquiry")
async def test_saving_known_blocks_again_is_a_use_of_them(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 5)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        await store.finish_writes()
        before = await _touched(store)
        again = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert (again.stored, again.known) == (0, 5)
        async with asyncio.timeout(PATIENCE_S):
            while await _touched(store) - before < 5 * 12:
                await asyncio.sleep(0.01)


async def _touched(store: StoreClient) -> int:
    return sum(
        target["touched"]
        for report in await store.node_reports()
        for target in report.statistics["targets"]
    )
