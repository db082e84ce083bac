"""Messages of a worker's socket: golden bytes, bounds, and garbage."""

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.frames import (
    SMALL_BYTES,
    FrameStalled,
    LargeFrames,
    LargeFramesBusy,
    read_frame,
)
from engine.worker.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    AskStatus,
    Failed,
    Finished,
    HandedOver,
    MalformedMessage,
    Refused,
    Resume,
    Status,
    Submit,
    Tokens,
    Waiting,
    decode_answer,
    decode_length,
    decode_request,
    encode_frame,
    pack_tokens,
    unpack_tokens,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def body_of(frame: bytes) -> bytes:
    assert decode_length(frame[:4]) == len(frame) - 4
    return frame[4:]


def test_frames_have_the_bytes_of_the_format() -> None:
    assert encode_frame(Tokens(position=3, token_ids=(7, 300), replay_first=128)).hex() == (
        "35000000"  # 53 bytes
        "84a474797065a6546f6b656e73"  # map of 4: "type": "Tokens"
        "a8706f736974696f6e03"
        "a9746f6b656e5f6964739207cd012c"
        "ac7265706c61795f6669727374cc80"
    )
    assert encode_frame(Waiting(state="queued", ahead=3)).hex() == (
        "22000000"
        "83a474797065a757616974696e67"  # map of 3: "type": "Waiting"
        "a57374617465a6717565756564"
        "a5616865616403"
    )
    assert encode_frame(AskStatus()).hex() == (
        "1900000082a474797065a941736b537461747573a776657273696f6e02"
    )
    assert pack_tokens([1, 2**31 - 1]).hex() == "01000000ffffff7f"


@pytest.mark.parametrize(
    "request_",
    [
        Submit(prompt_ids=pack_tokens([1, 2]), max_tokens=3),
        Submit(
            prompt_ids=pack_tokens([1]),
            max_tokens=1 << 20,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            seed=2**64 - 1,
            stop_ids=(1, 2**31 - 1),
            answered_ids=pack_tokens([9]),
            replay_first=128,
        ),
        Resume(ticket=b"x"),
        AskStatus(),
    ],
)
def test_request_comes_back_as_it_went(request_: Submit | Resume | AskStatus) -> None:
    assert decode_request(body_of(encode_frame(request_))) == request_


@pytest.mark.parametrize(
    "answer",
    [
        Tokens(position=0, token_ids=(1, 2)),
        Waiting(state="preempted"),
        Finished(reason="stop", report={"ttft_s": 0.5}),
        HandedOver(ticket=None),
        HandedOver(ticket=b"t"),
        Refused(reason="no", cause="busy"),
        Failed(reason="gone"),
        Status(document={"a": 1}),
    ],
)
def test_answer_comes_back_as_it_went(answer: Tokens | Finished | HandedOver) -> None:
    assert decode_answer(body_of(encode_frame(answer))) == answer


@given(token_ids)
def test_packed_tokens_come_back(ids: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(ids))) == ids


@pytest.mark.parametrize("packed", [b"abc", b"\xff\xff\xff\xff", b"\0\0\0\0\0\0\0\x80"])
def test_packed_tokens_that_are_none_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage, match="token id"):
        unpack_tokens(packed)


@given(st.binary(max_size=200))
def test_garbage_is_malformed_and_nothing_else(body: bytes) -> None:
    for decode in (decode_request, decode_answer):
        try:
            decode(body)
        except MalformedMessage:
            continue
        assert body[:1] >= b"\x80", "only a map with the name of a message is one"


@pytest.mark.parametrize(
    "change",
    [
        {"version": PROTOCOL_VERSION + 1},
        {"version": PROTOCOL_VERSION - 1},
        {"max_tokens": 0},
        {"max_tokens": (1 << 20) + 1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"seed": -1},
        {"stop_ids": list(range(65))},
        {"stop_ids": [-1]},
        {"ttl_class": "c" * 17},
        {"prompt_ids": "text"},
        {"unknown": 1},
        {"type": "Nothing"},
    ],
)
def test_request_out_of_its_bounds_is_malformed(change: dict[str, object]) -> None:
    right = {"type": "Submit", "prompt_ids": pack_tokens([1]), "max_tokens": 1}
    decode_request(msgspec.msgpack.encode(right))
    with pytest.raises(MalformedMessage):
        decode_request(msgspec.msgpack.encode(right | change))


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        decode_answer(b"\x82\xa4type\xa6Status\xa8document" + b"\x81\xa1a" * 100_000)


@pytest.mark.parametrize("length", [0, MESSAGE_BYTES_MAX + 1, 2**32 - 1])
def test_length_beyond_the_bound_is_malformed(length: int) -> None:
    with pytest.raises(MalformedMessage, match=f"a message of {length} bytes"):
        decode_length(length.to_bytes(4, "little"))


async def test_stream_that_ends_inside_a_message_is_malformed() -> None:
    frame = encode_frame(AskStatus())
    for end in range(1, len(frame)):
        reader = asyncio.StreamReader()
        reader.feed_data(frame[:end])
        reader.feed_eof()
        with pytest.raises(MalformedMessage, match="ends inside"):
            await read_frame(reader, deadline_s=60)


async def test_stream_that_ends_between_messages_has_ended() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(encode_frame(AskStatus()))
    reader.feed_eof()
    assert await read_frame(reader, deadline_s=60) == encode_frame(AskStatus())[4:]
    assert await read_frame(reader, deadline_s=60) is None


async def test_message_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        await read_frame(asyncio.StreamReader(), deadline_s=0.01)


def large_frame(size_bytes: int) -> bytes:
    return size_bytes.to_bytes(4, "little") + bytes(range(256)) * (size_bytes // 256)


async def test_stream_that_ends_four_bytes_before_the_end_of_a_message_is_malformed() -> None:
    for body_bytes, large in ((4, None), (SMALL_BYTES + 4, LargeFrames(1, wait_s=60, stall_s=60))):
        reader = asyncio.StreamReader()
        reader.feed_data(body_bytes.to_bytes(4, "little") + bytes(body_bytes - 4))
        reader.feed_eof()
        with pytest.raises(MalformedMessage, match="ends inside"):
            await read_frame(reader, deadline_s=60, large=large)


async def test_large_message_of_which_little_has_come_keeps_none_from_its_turn() -> None:
    large = LargeFrames(1, wait_s=60, stall_s=60)
    frame = large_frame(2 * SMALL_BYTES)
    idle = []
    for come_bytes in (5, SMALL_BYTES):
        reader = asyncio.StreamReader()
        reader.feed_data(frame[:come_bytes])
        idle.append(asyncio.ensure_future(read_frame(reader, deadline_s=60, large=large)))
    await asyncio.sleep(0)
    whole = asyncio.StreamReader()
    whole.feed_data(frame)
    assert await read_frame(whole, deadline_s=1, large=large) == frame[4:]
    assert not any(task.done() for task in idle)
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)


async def test_wait_for_the_turn_of_a_large_message_takes_nothing_of_its_deadline() -> None:
    large = LargeFrames(1, wait_s=60, stall_s=60)
    frame = large_frame(2 * SMALL_BYTES)
    reader = asyncio.StreamReader()
    reader.feed_data(frame)
    async with large.turn():
        waiting = asyncio.ensure_future(read_frame(reader, deadline_s=0.01, large=large))
        await asyncio.sleep(0.05)
        assert not waiting.done()
    assert await waiting == frame[4:]


async def test_large_message_that_never_gets_its_turn_is_told_so() -> None:
    large = LargeFrames(1, wait_s=0.01, stall_s=60)
    reader = asyncio.StreamReader()
    reader.feed_data(large_frame(2 * SMALL_BYTES))
    async with large.turn():
        with pytest.raises(LargeFramesBusy):
            await read_frame(reader, deadline_s=60, large=large)
    async with large.turn():
        pass  # whoever waited in vain has taken none


class LoopClock:
    """The time of the running loop, which stands until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)


@pytest.mark.parametrize("come_bytes", [1 << 10, SMALL_BYTES - 1])
async def test_large_message_of_which_no_more_comes_loses_its_turn(
    come_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch)
    large = LargeFrames(1, wait_s=60, stall_s=2)
    frame = large_frame(3 * SMALL_BYTES)
    stalled, whole = asyncio.StreamReader(), asyncio.StreamReader()
    stalled.feed_data(frame[: 4 + SMALL_BYTES + come_bytes])
    whole.feed_data(frame)
    first = asyncio.ensure_future(read_frame(stalled, deadline_s=10, large=large))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(read_frame(whole, deadline_s=10, large=large))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done(), "the stalled one has no turn"
    clock.now_s += 2.01
    assert await second == frame[4:]
    with pytest.raises(
        FrameStalled, match=rf"^sent only {SMALL_BYTES + come_bytes} of {3 * SMALL_BYTES} bytes$"
    ):
        await first


async def test_large_message_that_drips_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock(monkeypatch)
    large = LargeFrames(1, wait_s=60, stall_s=2)
    reader = asyncio.StreamReader()
    reader.feed_data(large_frame(3 * SMALL_BYTES)[: 4 + SMALL_BYTES])
    reading = asyncio.ensure_future(read_frame(reader, deadline_s=10, large=large))
    for _ in range(200):
        await asyncio.sleep(0)
        reader.feed_data(b"x")
        clock.now_s += 0.011
    with pytest.raises(FrameStalled, match="sent only"):
        await reading


@pytest.mark.parametrize(
    ("message_bytes", "begun_bytes", "come_bytes"),
    [
        (SMALL_BYTES, 1 << 10, SMALL_BYTES - (1 << 10)),
        (3 * SMALL_BYTES, SMALL_BYTES, 2 * SMALL_BYTES),
        (3 * SMALL_BYTES, SMALL_BYTES, SMALL_BYTES),
        (3 * SMALL_BYTES, SMALL_BYTES, SMALL_BYTES - 1),
    ],
)
async def test_bytes_that_come_while_the_worker_stands_still_are_read(
    message_bytes: int, begun_bytes: int, come_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch)
    frame = large_frame(message_bytes)
    begun, come, rest = (
        frame[: 4 + begun_bytes],
        frame[4 + begun_bytes :][:come_bytes],
        frame[4 + begun_bytes + come_bytes :],
    )
    ours, peer = socket.socketpair()
    with peer:
        reader, writer = await asyncio.open_connection(sock=ours)
        reader.feed_data(begun)
        large = LargeFrames(1, wait_s=60, stall_s=2)
        reading = asyncio.ensure_future(read_frame(reader, deadline_s=10, large=large))
        await asyncio.sleep(0)
        # Before the loop turns again.
        peer.sendall(come)
        clock.now_s += 15
        for _ in range(10):
            await asyncio.sleep(0)
        # Who had to wait for this process has time for the rest.
        peer.sendall(rest)
        assert await reading == frame[4:]
        writer.close()


async def test_bytes_that_come_as_the_loop_goes_on_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = LoopClock(monkeypatch)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    reading = asyncio.ensure_future(read_frame(reader, deadline_s=10))
    await asyncio.sleep(0)
    clock.now_s += 15
    # As after SIGSTOP: the loop's timers are due before it sees what has come.
    loop.call_soon(loop.call_soon, loop.call_soon, reader.feed_data, encode_frame(AskStatus()))
    assert await reading == encode_frame(AskStatus())[4:]
