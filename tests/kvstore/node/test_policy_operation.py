"""POLICY: a node keeps the newest document it is shown, also over a restart."""

import errno
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.node.answers import Request, refuse
from kvstore.node.disk import OsDisk
from kvstore.node.effects import NeedTurn, Send
from kvstore.node.policy_store import (
    FILE_BYTES_MAX,
    POLICY_NAME,
    PolicyStore,
    pack_policy_file,
    parse_policy_file,
)
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.wire import KIND_REQUEST, Op, Status, WriteOutcome, pack_frame, parse_header
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def policy_with_ttl(seconds: int, after: RetentionPolicy = DEFAULT_POLICY) -> RetentionPolicy:
    return after.with_ttl("chat", seconds, who="a test", why="to see", at_s=1_800_000_000)


def ask(driven: DrivenNode, offered: RetentionPolicy | None = None) -> RetentionPolicy:
    """The node's policy after it was shown one."""
    body = b"" if offered is None else offered.to_json()
    answer = driven.ask(Op.POLICY, body, len(body))
    assert answer.status is Status.OK, answer.body
    assert answer.headers[-1].count == 0
    return RetentionPolicy.parse(answer.body)


def test_node_has_the_default_policy_when_it_was_told_none(driven: DrivenNode) -> None:
    assert ask(driven) == DEFAULT_POLICY
    assert driven.stat()["policy_version"] == 0
    assert not (driven.folder / POLICY_NAME).exists()


def test_node_takes_a_newer_policy_and_keeps_it_over_a_crash(driven: DrivenNode) -> None:
    newer = policy_with_ttl(3600)
    assert ask(driven, newer) == newer
    assert driven.stat()["policy_version"] == 1
    driven.crash()
    driven.open()
    assert ask(driven) == newer


def test_node_answers_its_own_policy_when_it_is_shown_an_older_one(driven: DrivenNode) -> None:
    first = policy_with_ttl(3600)
    second = policy_with_ttl(7200, after=first)
    ask(driven, second)
    assert ask(driven, first) == second
    assert ask(driven, DEFAULT_POLICY) == second
    assert ask(driven, second) == second


def test_nodes_agree_on_one_of_two_policies_of_one_version(tmp_path: Path) -> None:
    offers = [policy_with_ttl(3600), policy_with_ttl(7200)]
    kept = []
    for i, order in enumerate((offers, offers[::-1])):
        node = DrivenNode(tmp_path / f"t{i}")
        for offer in order:
            last = ask(node, offer)
        kept.append(last)
        node.close()
    assert kept[0] == kept[1]
    assert kept[0] in offers


@pytest.mark.parametrize(
    "document",
    [b"x", b"{}", b"[" * 60_000, b'{"format":1}', b"\xff\xfe", b'"\\ud800"', b"nul"],
)
def test_policy_is_refused_when_it_is_none(driven: DrivenNode, document: bytes) -> None:
    answer = driven.ask(Op.POLICY, document, len(document))
    assert answer.status is Status.BAD_REQUEST
    assert answer.body
    assert ask(driven) == DEFAULT_POLICY


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_any_damage_of_a_policy_is_refused_or_gives_a_policy(
    driven: DrivenNode, at: int, byte: int, cut: int
) -> None:
    document = bytearray(policy_with_ttl(3600).to_json())
    document[at % len(document)] = byte
    body = bytes(document[: cut % (len(document) + 1) or None])
    answer = driven.ask(Op.POLICY, body, len(body))
    assert answer.status in (Status.OK, Status.BAD_REQUEST)
    ask(driven)


def test_policy_takes_effect_even_when_it_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    first = policy_with_ttl(3600)
    second = policy_with_ttl(7200, after=first)
    ask(driven, first)
    for operation in ("write", "sync", "rename"):
        disk.refuse = {operation: errno.ENOSPC}
        assert ask(driven, second) == second
        disk.refuse = {}
        assert "policy not written" in caplog.text
        caplog.clear()
        # What was written before is still whole.
        driven.crash()
        driven.open()
        assert ask(driven) == first
    driven.close()


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_node_starts_with_the_default_when_its_policy_file_is_half_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    driven = DrivenNode(tmp_path / "t")
    ask(driven, policy_with_ttl(3600))
    driven.close()
    path = tmp_path / "t" / POLICY_NAME
    content = path.read_bytes().rstrip()
    path.write_bytes(content[:kept])
    driven.open()
    assert ask(driven) == DEFAULT_POLICY
    lines = [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert len(lines) == 1
    assert "policy cannot be used" in lines[0].getMessage()
    # It learns from the others again, and has a whole file then.
    newer = policy_with_ttl(7200)
    assert ask(driven, newer) == newer
    driven.close()
    driven.open()
    assert ask(driven) == newer
    driven.close()


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_policy_file_is_not_believed_when_a_byte_is_another(at: int, flip: int) -> None:
    policy = policy_with_ttl(3600)
    content = bytearray(pack_policy_file(policy))
    content[at % (len(content) - 1)] ^= flip
    try:
        # White space may change: it is no part of what is said.
        assert parse_policy_file(bytes(content)) == policy
    except (InvalidArgument, ValueError):
        return


@pytest.mark.parametrize(
    "change", [{"ttl_s": {"\ud800": 1}}, {"\udfff": 1}, {"draining": ["\ud801"]}]
)
def test_node_refuses_a_document_with_half_of_a_surrogate_pair(
    driven: DrivenNode, change: dict[str, object]
) -> None:
    body = json.dumps({**DEFAULT_POLICY.to_values(), **change}).encode()
    assert driven.ask(Op.POLICY, body, len(body)).status is Status.BAD_REQUEST
    assert ask(driven) == DEFAULT_POLICY


def test_refusal_can_be_sent_whatever_text_it_quotes(driven: DrivenNode) -> None:
    request = Request(parse_header(pack_frame(Op.POLICY, KIND_REQUEST, request_id=5)), b"", 0.0)
    answer = driven.run(refuse(driven.node, request, Status.BAD_REQUEST, "given \ud800"))
    assert (answer.status, answer.body) == (Status.BAD_REQUEST, b"given \\ud800")


def test_policy_file_is_read_only_when_it_can_be_one(tmp_path: Path) -> None:
    (tmp_path / POLICY_NAME).write_bytes(b" " * (FILE_BYTES_MAX + 1))
    assert PolicyStore(tmp_path, OsDisk()).current == DEFAULT_POLICY
    (tmp_path / POLICY_NAME).unlink()
    (tmp_path / POLICY_NAME).mkdir()
    assert PolicyStore(tmp_path, OsDisk()).current == DEFAULT_POLICY
    assert PolicyStore(None, OsDisk()).current == DEFAULT_POLICY


def test_leftover_of_a_crash_does_not_keep_a_policy_from_being_written(
    driven: DrivenNode,
) -> None:
    (driven.folder / "policy.tmp").write_bytes(b"half")
    newer = policy_with_ttl(3600)
    assert ask(driven, newer) == newer
    assert parse_policy_file((driven.folder / POLICY_NAME).read_bytes()) == newer


def test_draining_node_takes_no_shards_and_gives_those_it_has(
    driven: DrivenNode, rng: random.Random
) -> None:
    before, after = make_shards(rng, 3, SHARD_BYTES), make_shards(rng, 2, SHARD_BYTES)
    driven.write(before)
    draining = DEFAULT_POLICY.with_draining("n01", True, who="a test", why="to see", at_s=1)
    ask(driven, draining)
    assert driven.stat()["draining"] == 1
    assert driven.write(after) == [WriteOutcome.FULL] * 2
    assert None not in driven.read(keys_of(before), SHARD_BYTES)
    ask(driven, draining.with_draining("n01", False, who="a test", why="to see", at_s=2))
    assert driven.stat()["draining"] == 0
    assert driven.write(after) == [WriteOutcome.STORED] * 2


def test_node_is_not_drained_by_another_ones_name(driven: DrivenNode, rng: random.Random) -> None:
    ask(driven, DEFAULT_POLICY.with_draining("n011", True, who="a test", why="to see", at_s=1))
    assert driven.write(make_shards(rng, 1, SHARD_BYTES)) == [WriteOutcome.STORED]


def test_policy_that_became_old_while_it_waited_is_not_taken(driven: DrivenNode) -> None:
    older = policy_with_ttl(3600)
    newer = policy_with_ttl(7200, after=older)
    body = older.to_json()
    waiting = driven.begin(Op.POLICY, body=body, count=len(body))
    turn = next(waiting)
    assert isinstance(turn, NeedTurn)
    assert ask(driven, newer) == newer
    assert turn.turn.try_take()
    assert isinstance(waiting.send(True), Send)
    assert ask(driven) == newer
    assert parse_policy_file((driven.folder / POLICY_NAME).read_bytes()) == newer
