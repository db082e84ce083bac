"""The client against workers that say what a test wants."""

import asyncio
import socket
from itertools import count
from pathlib import Path

import pytest

from engine.client import ClientDeadlines, EngineClient, EnginePlaces
from engine.errors import EnginesUnavailable, InvalidRequest
from engine.model_identity import ModelIdentity
from engine.request import Request
from engine.worker.address import WorkerAddress
from engine.worker.messages import (
    Answer,
    Failed,
    Finished,
    HandedOver,
    Refused,
    Status,
    Tokens,
    Waiting,
)
from tests.engine.worker.scripted_worker import WHOLE, say, serving


async def tokens_of(client: EngineClient, max_tokens: int = 4) -> list[int]:
    parts = client.generate([1, 2], max_tokens=max_tokens)
    return [token async for part in parts for token in part.token_ids]


async def test_client_carries_the_ticket_and_the_reports(folder: Path) -> None:
    first = (Tokens(position=0, token_ids=(5,)), HandedOver(ticket=b"t", report={"hit_tokens": 1}))
    rest = (Tokens(position=1, token_ids=(6,)), Finished(reason="length", report={"n": 2}))
    async with (
        serving(folder, "p", say(*first)) as (_, prefill),
        serving(folder, "d", say(*rest)) as (desk, decode),
    ):
        client = EngineClient(EnginePlaces(prefill=(prefill,), decode=(decode,)))
        parts = [part async for part in client.generate([1], max_tokens=4)]
        assert [part.token_ids for part in parts] == [(5,), (6,), ()]
        assert parts[-1].finish_reason == "length"
        assert parts[-1].report is not None
        assert parts[-1].report.engines == ({"hit_tokens": 1}, {"n": 2})
        assert desk.asked == [b"t"]


async def test_client_waits_and_asks_again_when_workers_are_busy(folder: Path) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    def script(asked: Request | bytes) -> list[Answer]:
        return [Refused(reason="busy", cause="busy")] if len(pauses) < 4 else list(WHOLE)

    async with serving(folder, "b", script) as (_, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=sleep)
        assert await tokens_of(client) == [5, 6]
        assert pauses == [0.02, 0.04, 0.08, 0.16]


class Clock:
    """Time goes by in sleep only, and there at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pauses.append(pause_s)


async def test_client_gives_up_when_workers_are_busy_for_too_long(folder: Path) -> None:
    clock = Clock()
    async with serving(folder, "b", say(Refused(reason="busy", cause="busy"))) as (_, place):
        client = EngineClient(
            EnginePlaces(both=(place,)),
            sleep=clock.sleep,
            deadlines=ClientDeadlines(patience_s=5),
            clock=clock,
        )
        with pytest.raises(
            EnginesUnavailable, match=r"goes on with it for 5 s: .*busy \(\d+ times"
        ):
            await tokens_of(client)
        assert clock.now_s == pytest.approx(5)


async def test_client_waits_for_absent_workers_as_long_as_its_patience(folder: Path) -> None:
    """The attempts are bounded too; and a new token begins the time anew."""
    clock = Clock()
    first = (Tokens(position=0, token_ids=(5,)), HandedOver(ticket=b"t"))
    absent = WorkerAddress(path=folder / "none.sock")
    stalls: list[str] = []
    async with serving(folder, "p", say(*first)) as (_, place):
        client = EngineClient(
            EnginePlaces(prefill=(place,), decode=(absent,)),
            sleep=clock.sleep,
            deadlines=ClientDeadlines(patience_s=60),
            on_stall=stalls.append,
            clock=clock,
        )
        with pytest.raises(EnginesUnavailable, match=r"none\.sock: no connection.*\(\d+ times\)"):
            await tokens_of(client)
    (stall,) = stalls
    assert stall.startswith("no engine worker that decodes goes on with it, trying for 60 s: ")
    assert clock.now_s == pytest.approx(60)
    assert len(clock.pauses) < 70


async def test_client_that_never_met_a_worker_says_at_once_that_none_is_there(folder: Path) -> None:
    places = EnginePlaces(
        prefill=(WorkerAddress(path=folder / "p.sock"),),
        decode=(WorkerAddress(path=folder / "d.sock"),),
    )
    clock = Clock()
    client = EngineClient(places, sleep=clock.sleep, clock=clock)
    with pytest.raises(EnginesUnavailable, match="no engine worker is there: ") as caught:
        await tokens_of(client)
    assert (len(caught.value.tried), clock.pauses) == (2, [])


async def test_client_that_met_its_workers_waits_for_them_also_for_a_new_request(
    folder: Path,
) -> None:
    clock = Clock()
    async with serving(folder, "b", say(*WHOLE)) as (_, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=clock.sleep, clock=clock)
        await tokens_of(client)
    with pytest.raises(EnginesUnavailable, match="goes on with it for 60 s"):
        await tokens_of(client)


async def test_time_that_busy_workers_take_to_say_so_counts_as_waiting(folder: Path) -> None:
    now_s = 0.0

    def slowly(asked: Request | bytes) -> list[Answer]:
        nonlocal now_s
        now_s += 2.0
        return [Refused(reason="busy", cause="busy")]

    async with serving(folder, "b", slowly) as (desk, place):
        client = EngineClient(
            EnginePlaces(both=(place,)),
            sleep=_sleep_not,
            deadlines=ClientDeadlines(patience_s=5),
            clock=lambda: now_s,
        )
        with pytest.raises(EnginesUnavailable):
            await tokens_of(client)
        assert len(desk.asked) == 4


async def test_request_that_waits_at_a_worker_is_in_good_hands(folder: Path) -> None:
    """The time in line is no time in which nobody has the request."""
    clock = Clock()
    turns = count()

    def script(asked: Request | bytes) -> list[Answer]:
        if next(turns) >= 4:
            return list(WHOLE)
        clock.now_s += 50
        return [Waiting(state="queued", ahead=1), Failed(reason="no room")]

    async with serving(folder, "b", script) as (_, place):
        client = EngineClient(
            EnginePlaces(both=(place,)),
            sleep=clock.sleep,
            deadlines=ClientDeadlines(patience_s=60),
            clock=clock,
        )
        assert await tokens_of(client) == [5, 6]
    assert clock.now_s > 200


@pytest.mark.parametrize(
    ("waiting", "words"),
    [
        (Waiting(state="queued", ahead=3), "it waits there behind 3 requests$"),
        (
            Waiting(state="preempted", ahead=1),
            "it waits there behind 1 request, having given way to others$",
        ),
        (Waiting(state="begun"), "it works on it$"),
    ],
)
async def test_client_gives_up_a_request_that_waits_for_too_long(
    folder: Path, waiting: Waiting, words: str
) -> None:
    clock = Clock()

    def script(asked: Request | bytes) -> list[Answer]:
        clock.now_s += 20
        return [waiting]

    async with serving(folder, "b", script) as (desk, place):
        client = EngineClient(
            EnginePlaces(both=(place,)), deadlines=ClientDeadlines(waiting_s=20), clock=clock
        )
        with pytest.raises(EnginesUnavailable, match=f"has given a token for 20 s: .*{words}"):
            await tokens_of(client)
        assert await desk.server.wait_until_idle(30), "it is given up there too"


async def test_ticket_is_kept_while_its_worker_has_only_said_that_it_waits(folder: Path) -> None:
    first = (Tokens(position=0, token_ids=(5,)), HandedOver(ticket=b"t"))
    rest = (Tokens(position=1, token_ids=(6,)), Finished(reason="length"))
    async with (
        serving(folder, "p", say(*first)) as (_, prefill),
        serving(folder, "d1", say(Waiting(state="begun"))) as (_, silent),
        serving(folder, "d2", say(*rest)) as (desk, sound),
    ):
        client = EngineClient(
            EnginePlaces(prefill=(prefill,), decode=(silent, sound)),
            deadlines=ClientDeadlines(between_tokens_s=0.5),
            sleep=_sleep_not,
        )
        assert await tokens_of(client) == [5, 6]
        assert desk.asked[0] == b"t"


async def test_attempts_are_bounded_by_what_is_left_of_the_patience(folder: Path) -> None:
    clock = Clock()
    async with serving(folder, "b", say()) as (_, place):
        client = EngineClient(
            EnginePlaces(both=(place,)),
            sleep=clock.sleep,
            deadlines=ClientDeadlines(connect_s=0.05, first_token_s=0.3, patience_s=0.1),
            clock=clock,
        )
        with pytest.raises(
            EnginesUnavailable, match=r"nothing from it for 0\.3 s; .*nothing from it for 0\.08 s"
        ):
            await tokens_of(client)


async def test_client_gives_up_after_a_bounded_number_of_faults(folder: Path) -> None:
    async with serving(folder, "b", say(Failed(reason="no room"))) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), faults_max=3, sleep=_sleep_not)
        with pytest.raises(EnginesUnavailable, match=r"after 3 faults: .*no room \(3 times\)"):
            await tokens_of(client)
        assert len(desk.asked) == 3


async def test_client_runs_again_with_the_tokens_that_it_has_given_out(folder: Path) -> None:
    def script(asked: Request | bytes) -> list[Answer]:
        assert isinstance(asked, Request)
        if not asked.answered_ids:
            return [Tokens(position=0, token_ids=(5,), replay_first=128), Failed(reason="lost")]
        return [Tokens(position=1, token_ids=(6,)), Finished(reason="length")]

    async with serving(folder, "b", script) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=_sleep_not)
        assert await tokens_of(client) == [5, 6]
        again = desk.asked[1]
        assert isinstance(again, Request)
        assert (again.answered_ids, again.replay_first) == ((5,), 128)


async def test_answer_ended_by_the_context_is_whole_when_its_worker_is_lost_before_it_says_so(
    folder: Path,
) -> None:
    def script(asked: Request | bytes) -> list[Answer]:
        assert isinstance(asked, Request)
        if not asked.answered_ids:
            return [Tokens(position=0, token_ids=(5, 6)), Failed(reason="lost")]
        return [Finished(reason="length")]

    async with serving(folder, "b", script) as (_, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=_sleep_not)
        parts = [part async for part in client.generate([1, 2], max_tokens=9)]
    assert [part.token_ids for part in parts] == [(5, 6), ()]
    assert parts[-1].finish_reason == "length"


async def test_client_ends_an_answer_that_is_whole_when_its_worker_is_lost(folder: Path) -> None:
    script = say(Tokens(position=0, token_ids=(5, 6)), Failed(reason="lost"))
    async with serving(folder, "b", script) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=_sleep_not)
        assert await tokens_of(client, max_tokens=2) == [5, 6]
        assert len(desk.asked) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        Status(document={}),
        Finished(reason="length"),
        Tokens(position=3, token_ids=(1,)),
        Tokens(position=0, token_ids=()),
        Tokens(position=0, token_ids=(1,) * 9),
    ],
)
async def test_worker_that_makes_no_sense_is_left_for_another(folder: Path, wrong: Answer) -> None:
    async with (
        serving(folder, "a", say(wrong)) as (_, senseless),
        serving(folder, "b", say(*WHOLE)) as (_, sound),
    ):
        client = EngineClient(EnginePlaces(both=(senseless, sound)), sleep=_sleep_not)
        assert await tokens_of(client) == [5, 6]


async def test_what_no_worker_would_take_is_an_error_of_the_caller(folder: Path) -> None:
    async with serving(folder, "b", say(Refused(reason="too long", cause="invalid"))) as (_, place):
        client = EngineClient(EnginePlaces(both=(place,)))
        with pytest.raises(InvalidRequest, match=r"^too long$"):
            await tokens_of(client)
        for prompt, max_tokens in (([], 4), ([-1], 4), ([2**31], 4), ([1], 0)):
            with pytest.raises(InvalidRequest):
                await anext(client.generate(prompt, max_tokens=max_tokens))


async def _sleep_not(pause_s: float) -> None:
    """Time does not matter here."""


async def test_workers_that_pass_a_request_round_for_ever_are_noticed(folder: Path) -> None:
    for name, ticket in (("a", None), ("b", b"t")):
        async with serving(folder, name, say(HandedOver(ticket=ticket))) as (desk, place):
            client = EngineClient(EnginePlaces(both=(place,)), faults_max=4, sleep=_sleep_not)
            with pytest.raises(EnginesUnavailable, match=rf"{name}\.sock: .*hand.*\(4 times\)"):
                await tokens_of(client)
            assert len(desk.asked) == 4


async def test_client_lets_go_of_a_worker_that_does_not_read(folder: Path) -> None:
    path = folder / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        deadlines = ClientDeadlines(first_token_s=0.01)
        places = EnginePlaces(both=(WorkerAddress(path=path),))
        client = EngineClient(places, deadlines=deadlines, faults_max=1)
        with pytest.raises(EnginesUnavailable, match="nothing from it"):
            # More than the socket holds, so that some of it is still to be sent.
            await anext(client.generate([1] * (1 << 20), max_tokens=1))
        connection, _ = deaf.accept()
        received_bytes = 0
        with connection:
            connection.setblocking(False)
            while data := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
                received_bytes += len(data)
        assert received_bytes < 4 << 20, "the rest of the request was kept for it"


OWN = ModelIdentity(name="deepseek_v41", tokenizer="sha256:aaaaaaaa11", source="v41-mini")
COPY = ModelIdentity(name="deepseek_v41", tokenizer="sha256:aaaaaaaa11", source="elsewhere")
OTHER = ModelIdentity(name="SmolLM2", tokenizer="sha256:bbbbbbbb22", source="smollm.gguf")


async def test_worker_of_another_model_is_refused_in_one_line_that_names_both(
    folder: Path,
) -> None:
    async with serving(folder, "b", say(*WHOLE), model=OTHER.to_document()) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), model=OWN)
        with pytest.raises(InvalidRequest) as caught:
            await tokens_of(client)
    assert str(caught.value) == (
        "model: given v41-mini (deepseek_v41, tokenizer aaaaaaaa),"
        " expected smollm.gguf (SmolLM2, tokenizer bbbbbbbb),"
        f" which the engine at {place} serves"
    )
    assert desk.asked == [], "a prompt of another model"


async def test_worker_that_goes_on_with_another_model_is_refused_too(folder: Path) -> None:
    first = (Tokens(position=0, token_ids=(5,)), HandedOver(ticket=b"t"))
    async with (
        serving(folder, "p", say(*first), model=COPY.to_document()) as (_, prefill),
        serving(folder, "d", say(*WHOLE), model=OTHER.to_document()) as (desk, decode),
    ):
        client = EngineClient(EnginePlaces(prefill=(prefill,), decode=(decode,)), model=OWN)
        with pytest.raises(InvalidRequest, match=r"which the engine at .*d\.sock serves"):
            await tokens_of(client)
    assert desk.asked == []


@pytest.mark.parametrize(
    "said", [None, {}, {"name": 1, "tokenizer": [], "source": None}, COPY.to_document()]
)
async def test_worker_that_does_not_say_its_model_or_has_a_copy_of_it_is_asked(
    folder: Path, said: dict[str, object] | None
) -> None:
    async with serving(folder, "b", say(*WHOLE), model=said) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), model=OWN)
        for _ in range(2):
            assert await tokens_of(client) == [5, 6]
        assert desk.server.counts.accepted == 3, "each request, and one question for its model"


async def test_worker_that_does_not_say_its_model_in_time_is_left_and_is_no_fault(
    folder: Path,
) -> None:
    """It has nothing of the request, and the time for a first token is not for this question."""
    path = folder / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        async with serving(folder, "b", say(*WHOLE), model=OWN.to_document()) as (_, place):
            client = EngineClient(
                EnginePlaces(both=(WorkerAddress(path=path), place)),
                model=OWN,
                deadlines=ClientDeadlines(connect_s=0.3, first_token_s=1000, patience_s=1000),
                faults_max=1,
                sleep=_sleep_not,
            )
            parts = [part async for part in client.generate([1, 2], max_tokens=4)]
    report = parts[-1].report
    assert report is not None
    assert f"{path}: nothing from it for 0.3 s" in report.tried


async def test_worker_that_was_lost_is_asked_for_its_model_again(folder: Path) -> None:
    clock = Clock()
    places = EnginePlaces(both=(WorkerAddress(path=folder / "b.sock"),))
    client = EngineClient(places, model=OWN, sleep=clock.sleep, clock=clock)
    async with serving(folder, "b", say(*WHOLE), model=OWN.to_document()):
        assert await tokens_of(client) == [5, 6]
    (folder / "b.sock").unlink()
    with pytest.raises(EnginesUnavailable):
        await tokens_of(client)
    async with serving(folder, "b", say(*WHOLE), model=OTHER.to_document()):
        with pytest.raises(InvalidRequest, match=r"^model: given v41-mini"):
            await tokens_of(client)


async def test_first_token_that_no_decode_worker_goes_on_from_explains_itself(
    folder: Path,
) -> None:
    clock = Clock()
    first = (Tokens(position=0, token_ids=(5,)), HandedOver(ticket=b"t"))
    async with serving(folder, "p", say(*first)) as (_, prefill):
        places = EnginePlaces(prefill=(prefill,), decode=(WorkerAddress(path=folder / "d.sock"),))
        client = EngineClient(places, sleep=clock.sleep, clock=clock)
        with pytest.raises(
            EnginesUnavailable, match=r"^no engine worker that decodes goes on with it for 60 s: "
        ):
            await tokens_of(client)
