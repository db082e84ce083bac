"""What a host tells the entrypoints: shares, batches, silence, and what is told again.

The parts are real ones in this process, behind a line that a test may cut.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DeadlineExceeded, NodeError, NodeUnreachable
from kvstore.window import announcer
from kvstore.window.announcer import TICK_S, Announcer
from kvstore.window.directory import DirectoryPart
from kvstore.window.directory_host import DirectoryHost
from kvstore.window.entrypoint_link import (
    DEAD_AFTER_S,
    ITEMS_MAX,
    MOVED_KEPT_S,
    QUEUE_MAX,
    EntrypointLink,
)
from kvstore.window.entrypoints import Place
from kvstore.window.messages import AnnounceAnswer, Announcement
from kvstore.window.part_transport import OnAnswer, OnFailure, OwnPart
from kvstore.window.partition import choose_entrypoint, plan_moves
from tests.kvstore.node.driven_node import SetClock
from tests.kvstore.window.hosts import MovedClock, key_of
from tests.patience import OPERATION_S, until

HOST = "10.0.0.1:7000"
NAMES = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)


@given(before=NAMES, after=NAMES)
def test_only_keys_of_another_entrypoint_than_before_move(
    before: list[str], after: list[str]
) -> None:
    keys = [key_of(number) for number in range(50)]
    moved = plan_moves(keys, before, after)
    for key in keys:
        was, now = choose_entrypoint(key, before), choose_entrypoint(key, after)
        assert [names for names, share in moved.items() if key in share] == (
            [(was, now)] if was != now else []
        )


def test_everything_moves_to_the_first_that_answer() -> None:
    keys = [key_of(number) for number in range(50)]
    moved = plan_moves(keys, [], ["e1", "e2"])
    assert sorted(key for share in moved.values() for key in share) == sorted(keys)


# One entrypoint -----------------------------------------------------------------------------------


def link_of(clock: SetClock) -> EntrypointLink:
    return EntrypointLink("e1", "10.0.0.9:1", clock.monotonic_s)


def answer(instance: int = 1, *, is_new: bool = False) -> AnnounceAnswer:
    return AnnounceAnswer(instance, 0, 0, is_new)


def test_link_tells_each_key_once_and_in_batches() -> None:
    link = link_of(SetClock())
    keys = [key_of(number) for number in range(ITEMS_MAX + 5)]
    link.add(keys)
    link.add(keys[:3])
    assert link.take_batch() == keys[:ITEMS_MAX]
    link.on_answer(answer())
    assert link.take_batch() == keys[ITEMS_MAX:]
    assert link.queued == 0


def test_link_is_dead_after_silence_and_alive_when_it_answers() -> None:
    clock = SetClock()
    link = link_of(clock)
    assert not link.check()
    clock.advance(60.0)
    assert not link.check(), "nothing was asked"
    link.add([key_of(1)])
    link.take_batch()
    clock.advance(DEAD_AFTER_S - 0.1)
    assert not link.check()
    clock.advance(0.2)
    assert link.check()
    assert not link.check(), "it is told once"
    assert not link.is_alive
    assert link.on_answer(answer()) is False
    assert link.is_alive


def test_refused_connections_are_silence_too() -> None:
    clock = SetClock()
    link = link_of(clock)
    for _ in range(3):
        assert not link.check()
        link.take_batch()
        link.on_failure()
        clock.advance(0.9)
    assert link.check()


def test_silence_is_forgiven_when_this_process_stood_still() -> None:
    clock = SetClock()
    link = link_of(clock)
    link.take_batch()
    clock.advance(30.0)
    link.forgive(29.5)
    assert not link.check()
    clock.advance(DEAD_AFTER_S)
    assert link.check()


@pytest.mark.parametrize("reason", ["another instance", "not known", "lost"])
def test_link_must_be_told_everything_again(reason: str) -> None:
    link = link_of(SetClock())
    link.add([key_of(1)])
    link.take_batch()
    assert not link.on_answer(answer())
    if reason == "lost":
        link.add([key_of(2)])
        link.take_batch()
        link.on_failure()
    link.take_batch()
    found = answer(2 if reason == "another instance" else 1, is_new=reason == "not known")
    assert link.on_answer(found)
    link.take_batch()
    assert not link.on_answer(answer(found.instance))


def test_link_withdraws_what_moved_away_after_the_news_and_not_before_its_time() -> None:
    clock = SetClock()
    link = link_of(clock)
    moved, news = [key_of(1), key_of(2)], [key_of(number) for number in range(10, 10 + ITEMS_MAX)]
    link.leave_behind(moved)
    clock.advance(MOVED_KEPT_S - 0.1)
    assert (link.queued, link.take_batch()) == (0, [])
    link.on_answer(answer())
    clock.advance(0.2)
    link.add(news)
    assert link.queued == ITEMS_MAX + 2
    assert link.take_batch() == news
    link.on_answer(answer())
    assert link.take_batch() == moved
    link.on_answer(answer())
    assert (link.queued, link.take_batch()) == (0, [])


def test_link_withdraws_nothing_that_came_back_to_its_share() -> None:
    clock = SetClock()
    link = link_of(clock)
    link.leave_behind([key_of(1), key_of(2)])
    link.add([key_of(1)])
    clock.advance(MOVED_KEPT_S)
    assert link.take_batch() == [key_of(1), key_of(2)]
    link.on_answer(answer())
    assert link.queued == 0


def test_link_that_is_dead_has_nothing_to_withdraw() -> None:
    clock = SetClock()
    link = link_of(clock)
    link.leave_behind([key_of(1)])
    link.take_batch()
    clock.advance(max(DEAD_AFTER_S, MOVED_KEPT_S))
    assert link.check()
    assert link.queued == 0


@pytest.mark.parametrize("say", [EntrypointLink.add, EntrypointLink.leave_behind])
def test_what_waits_for_a_link_is_bounded(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[EntrypointLink, list[bytes]], None]
) -> None:
    monkeypatch.setattr("kvstore.window.entrypoint_link.QUEUE_MAX", 10)
    assert QUEUE_MAX > 10
    clock = SetClock()
    link = link_of(clock)
    keys = [key_of(number) for number in range(25)]
    for key in keys:
        say(link, [key])
    clock.advance(MOVED_KEPT_S)
    assert link.take_batch() == keys[-10:]


# All of them --------------------------------------------------------------------------------------


@dataclass
class Line:
    """A part of this process behind a line: `is_cut` refuses, `is_silent` swallows, and what takes
    `delay_s` is late for who does not wait so long."""

    part: OwnPart
    directory: DirectoryHost
    is_cut: bool = False
    is_silent: bool = False
    delay_s: float = 0.0
    said: list[Announcement] = field(default_factory=list)

    def announce(self, said: Announcement, on_answer: OnAnswer, on_failure: OnFailure) -> None:
        self.said.append(said)
        if self.is_cut:
            error: NodeError = NodeUnreachable("e", "the line is cut")
            asyncio.get_running_loop().call_soon(on_failure, error)
        elif not self.is_silent:
            self.part.announce(said, on_answer, on_failure)

    async def look_up(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        if self.delay_s > deadline_s:
            raise DeadlineExceeded("e", "the line is slow")
        if self.is_cut or self.is_silent:
            raise NodeUnreachable("e", "the line is cut")
        return await self.part.look_up(keys, deadline_s)

    def close(self) -> None:
        self.part.close()


class Records(dict[bytes, tuple[int, float]]):
    """Records of a host without their bytes."""

    def keys(self) -> list[bytes]:  # type: ignore[override]
        return list(self)

    def find(self, key: bytes) -> tuple[int, float] | None:
        return self.get(key)

    def put(self, *numbers: int) -> list[bytes]:
        keys = [key_of(number) for number in numbers]
        self.update(dict.fromkeys(keys, (20_000, 180.0)))
        return keys

    def drop(self, *numbers: int) -> list[bytes]:
        keys = [key_of(number) for number in numbers]
        for key in keys:
            del self[key]
        return keys


class Scene:
    """A host that announces to the entrypoints `names`."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.clock = MovedClock()
        self.records = Records()
        self.lines: dict[str, Line] = {}
        self.announcer = Announcer(
            host=HOST,
            instance=1,
            records=self.records,
            places=lambda: [Place(name, f"10.0.0.9:{1 + i}") for i, name in enumerate(self.names)],
            open_part=self._open_part,
            loop=asyncio.get_running_loop(),
            clock=self.clock,
        )

    def _open_part(self, place: Place) -> Line:
        part = DirectoryPart(self.clock)
        directory = DirectoryHost(part, instance=len(self.lines) + 1, clock=self.clock)
        loop = asyncio.get_running_loop()
        line = self.lines[place.name] = Line(OwnPart(directory, loop), directory)
        return line

    def put(self, *numbers: int) -> None:
        self.announcer.note(self.records.put(*numbers))

    def drop(self, *numbers: int) -> None:
        self.announcer.note(self.records.drop(*numbers))

    def entries(self) -> int:
        return sum(line.directory.entries for line in self.lines.values())

    def entries_by_name(self) -> dict[str, int]:
        return {name: line.directory.entries for name, line in self.lines.items()}

    async def found(self, *numbers: int, deadline_s: float = OPERATION_S) -> list[int]:
        hosts = await self.announcer.look_up([key_of(number) for number in numbers], deadline_s)
        return [number for number, host in zip(numbers, hosts, strict=True) if host is not None]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    it = Scene("e1", "e2", "e3")
    it.announcer.start()
    yield it
    it.announcer.close()


async def test_news_go_in_batches_to_whom_they_concern(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    for line in scene.lines.values():
        line.said.clear()
    for number in range(3000):
        scene.put(number)
    await until(lambda: scene.entries() == 3000)
    assert await scene.found(*range(1000)) == list(range(1000))
    for name, line in scene.lines.items():
        told = [item.key for said in line.said for item in said.items]
        assert {choose_entrypoint(key, scene.names) for key in told} == {name}
        assert len([said for said in line.said if said.items]) <= 3
        assert max(len(said.items) for said in line.said) <= ITEMS_MAX


async def test_last_state_of_a_record_is_told(scene: Scene) -> None:
    scene.put(1, 2, 3)
    scene.drop(1)
    scene.put(1)
    scene.drop(2)
    await until(lambda: scene.entries() == 2)
    await asyncio.sleep(0.1)
    assert await scene.found(1, 2, 3) == [1, 3]


async def test_host_says_that_it_lives_without_any_news(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    line = scene.lines["e1"]
    said = len(line.said)
    await until(lambda: len(line.said) > said)
    assert line.said[-1].items == []


async def test_batch_that_was_lost_is_told_again(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    for line in scene.lines.values():
        line.is_cut = True
    scene.put(*range(50))
    await asyncio.sleep(0.2)
    assert scene.entries() == 0
    for line in scene.lines.values():
        line.is_cut = False
    await until(lambda: scene.entries() == 50)


async def test_share_of_a_silent_entrypoint_moves_to_the_others(scene: Scene) -> None:
    scene.put(*range(60))
    await until(lambda: scene.entries() == 60)
    share = [n for n in range(60) if choose_entrypoint(key_of(n), scene.names) == "e2"]
    scene.lines["e2"].is_silent = True
    assert await scene.found(*share) == []
    begun = scene.lines["e1"].directory.entries + scene.lines["e3"].directory.entries
    await until(
        lambda: (
            scene.lines["e1"].directory.entries + scene.lines["e3"].directory.entries
            == begun + len(share)
        )
    )
    assert await scene.found(*range(60)) == list(range(60))
    assert [row["is_alive"] for row in scene.announcer.describe()] == [True, False, True]


async def check_that_only_shares_are_left(scene: Scene, numbers: Sequence[int]) -> None:
    """Each part has its share, and soon nothing else."""
    keys = [key_of(number) for number in numbers]
    share = dict.fromkeys(scene.names, 0)
    for key in keys:
        share[choose_entrypoint(key, scene.names)] += 1
    scene.clock.ahead_s += MOVED_KEPT_S
    await until(lambda: scene.entries_by_name() == share)
    assert await scene.found(*numbers) == list(numbers)
    for name, line in scene.lines.items():
        known = line.directory.look_up(keys)
        assert [host is not None for host in known] == [
            choose_entrypoint(key, scene.names) == name for key in keys
        ]


async def test_share_of_an_entrypoint_that_is_added_leaves_the_others_after_a_while(
    scene: Scene,
) -> None:
    scene.put(*range(90))
    await until(lambda: scene.entries() == 90)
    before = scene.entries_by_name()
    scene.names.append("e4")
    moved = [n for n in range(90) if choose_entrypoint(key_of(n), scene.names) == "e4"]
    await until(lambda: scene.entries_by_name().get("e4") == len(moved) > 0)
    # Who has not seen the new map yet still finds everything.
    assert scene.entries_by_name() == {**before, "e4": len(moved)}
    scene.drop(moved[0])
    scene.put(100)
    await check_that_only_shares_are_left(scene, [*(n for n in range(90) if n != moved[0]), 100])


async def test_share_of_an_entrypoint_that_comes_back_leaves_the_others_after_a_while(
    scene: Scene,
) -> None:
    scene.put(*range(90))
    await until(lambda: scene.entries() == 90)
    scene.lines["e2"].is_cut = True
    had = scene.entries_by_name()["e2"]
    await until(lambda: scene.entries() == 90 + had)
    scene.drop(*range(5))
    scene.lines["e2"].is_cut = False
    await until(lambda: scene.announcer.describe()[1]["is_alive"])
    # What it was told before it fell silent and is gone since, it is told nothing of: the reader
    # who fetches it in vain withdraws it.
    for number in range(5):
        scene.announcer.withdraw(HOST, key_of(number))
    await check_that_only_shares_are_left(scene, range(5, 90))


async def test_entrypoints_are_not_blamed_when_this_process_stood_still(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    for line in scene.lines.values():
        line.is_silent = True
        line.said.clear()
    await until(lambda: all(line.said for line in scene.lines.values()))
    scene.clock.ahead_s += 30.0  # each has an announcement under way
    await asyncio.sleep(2 * TICK_S)
    assert all(row["is_alive"] for row in scene.announcer.describe())


@pytest.mark.parametrize("is_hasty", [True, False])
async def test_only_who_waited_long_enough_suspects_an_entrypoint(
    scene: Scene, is_hasty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.put(*range(60))
    await until(lambda: scene.entries() == 60)
    for line in scene.lines.values():
        line.is_silent, line.delay_s = True, 0.4
    with monkeypatch.context() as patch:
        patch.setattr(announcer, "LOOKUP_S_MAX", 0.2)
        assert await scene.found(*range(60), deadline_s=0.1 if is_hasty else 0.2) == []
    for line in scene.lines.values():
        line.is_silent, line.delay_s = False, 0.0
    # A suspect is not asked before it has answered something.
    assert await scene.found(*range(60)) == (list(range(60)) if is_hasty else [])


async def test_other_hosts_entry_is_withdrawn_where_it_is_kept(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    scene.put(1)
    await until(lambda: scene.entries() == 1)
    scene.announcer.withdraw(HOST, key_of(1))
    await until(lambda: scene.entries() == 0)


async def test_parts_forget_a_host_that_leaves(scene: Scene) -> None:
    scene.put(*range(30))
    await until(lambda: scene.entries() == 30)
    await scene.announcer.leave(1.0)
    assert [line.directory.look_up([key_of(1)]) for line in scene.lines.values()] == [[None]] * 3


async def test_leaving_ends_in_time_when_nobody_answers(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    for line in scene.lines.values():
        line.is_silent = True
    async with asyncio.timeout(10.0):
        await scene.announcer.leave(0.2)
