"""What /metrics of an engine says, and that it says what docs/metrics.md says."""

import asyncio
import http.client
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.engine_status import EngineCounts
from engine.handover.receiver import ReceiverCounts
from engine.handover.sender import SenderCounts
from engine.worker.metric_table import ENGINE_METRICS, ENGINE_TABLE
from engine.worker.options import Role
from tests.engine.worker.worker_process import WorkerProcess, ask, submission
from tests.kvstore.admin.test_metrics import documented

WAIT_S = 30.0


def read_samples(content: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def test_every_metric_of_engines_is_documented_and_named_by_its_unit() -> None:
    listed = {name: row for name, row in documented().items() if "_engine_" in name}
    assert listed == {
        metric.name: (
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.unit,
        )
        for metric in ENGINE_METRICS
    }
    for metric in ENGINE_METRICS:
        stem = metric.name.removesuffix("_total")
        if metric.unit in ("seconds", "bytes"):
            assert stem.endswith(f"_{metric.unit}"), metric.name
        assert set(metric.labels).isdisjoint({"engine", "node", "le", "job", "instance"})


def test_everything_that_an_engine_counts_is_a_metric() -> None:
    # A sequence that was attached is one that was taken over.
    for one in fields(EngineCounts):
        status: dict[str, Any] = {"engine": {"counts": {one.name: 7}}}
        shown = [
            value for value in read_samples(ENGINE_TABLE.render(status)).values() if value == 7
        ]
        assert len(shown) == (0 if one.name == "attached" else 1), one.name


def test_every_end_of_a_hand_over_is_a_metric() -> None:
    for way, counts in {"out": SenderCounts, "in": ReceiverCounts}.items():
        numbers = {one.name: 7 for one in fields(counts)}
        samples = read_samples(ENGINE_TABLE.render({"hand_overs": {way: numbers}}))
        shown = {dict(labels)["outcome"] for (_, labels), value in samples.items() if value == 7}
        assert shown == set(numbers)


def get(address: tuple[str, int], path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=WAIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def test_worker_serves_its_metrics_while_it_runs(folder: Path, nano_path: Path) -> None:
    worker = WorkerProcess("b01", Role.BOTH, folder, nano_path, agent=None, metrics="127.0.0.1:0")
    worker.start()
    worker.wait_until_ready()
    try:
        found = re.search(r"http://(127\.0\.0\.1):(\d+)/metrics", worker.log_path.read_text())
        assert found is not None
        address = found[1], int(found[2])
        await ask(worker.address, submission([1, 2, 3], 4))
        status, content = await asyncio.to_thread(get, address, "/metrics")
        assert status == 200
        assert await asyncio.to_thread(get, address, "/healthz") == (200, b'{"is_serving":true}')
    finally:
        worker.kill()
    samples = read_samples(content)
    engine = ("engine", "b01")
    assert samples["cachalot_engine_info", frozenset({engine, ("role", "both")})] == 1
    assert samples["cachalot_engine_requests_total", frozenset({engine})] == 1
    ended = frozenset({engine, ("ended", "finished")})
    assert samples["cachalot_engine_requests_ended_total", ended] == 1
    assert samples["cachalot_engine_answer_tokens_total", frozenset({engine})] == 4
    assert samples["cachalot_engine_first_token_seconds_count", frozenset({engine})] == 1
    # Each has its figure, but for those of an agent, which this worker has not.
    without = {
        name
        for metric in ENGINE_METRICS
        for name in [f"{metric.name}_count" if metric.kind == "histogram" else metric.name]
        if not any(sample == name for sample, _ in samples)
    }
    assert without == {"cachalot_engine_handed_over_total", "cachalot_engine_taken_over_total"}
