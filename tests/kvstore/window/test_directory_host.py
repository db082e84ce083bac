"""Which hosts a part of the directory believes in, by a clock that is set."""

import pytest

from kvstore.errors import InvalidArgument
from kvstore.window import directory_host
from kvstore.window.directory import DirectoryPart
from kvstore.window.directory_host import HOST_SILENT_S, DirectoryHost
from kvstore.window.messages import AnnouncedItem, Announcement
from tests.kvstore.node.driven_node import SetClock
from tests.kvstore.window.hosts import key_of

A, B = "10.0.0.1:7000", "10.0.0.2:7000"


class Directory:
    def __init__(self) -> None:
        self.clock = SetClock()
        part = DirectoryPart(self.clock.monotonic_s)
        self.host = DirectoryHost(part, instance=5, clock=self.clock.monotonic_s)

    def say(self, host: str, *numbers: int, instance: int = 1) -> bool:
        """An announcement; whether the part wants to be told everything."""
        items = [AnnouncedItem(key_of(number), 20_000, 180_000) for number in numbers]
        answer = self.host.announce(Announcement(host, instance, len(items), items=items))
        assert answer.instance == 5
        return answer.is_new

    def where(self, *numbers: int) -> list[str | None]:
        return self.host.look_up([key_of(number) for number in numbers])


@pytest.fixture
def directory() -> Directory:
    return Directory()


def test_host_is_new_once_and_again_when_it_begins_anew(directory: Directory) -> None:
    assert directory.say(A, 1, 2)
    assert not directory.say(A, 3)
    assert directory.say(A, 4, instance=2)
    assert directory.where(1, 2, 3, 4) == [None, None, None, A]


def test_silent_host_is_forgotten_with_its_entries_and_the_others_are_not(
    directory: Directory,
) -> None:
    directory.say(A, 1)
    directory.say(B, 2)
    directory.clock.advance(HOST_SILENT_S - 0.1)
    directory.say(B)
    directory.host.expire()
    assert directory.where(1, 2) == [A, B]
    directory.clock.advance(0.2)
    directory.host.expire()
    assert directory.where(1, 2) == [None, B]
    assert directory.host.silent_hosts == 1
    assert directory.say(A, 1)
    assert directory.where(1) == [A]


def test_host_that_fell_silent_is_missed_for_a_while_and_one_that_left_is_not(
    directory: Directory,
) -> None:
    def missed() -> list[tuple[str, float]]:
        listed = directory.host.describe()["hosts_missed"]
        return [(one["address"], one["silent_s"]) for one in listed]

    directory.say(A, 1)
    directory.say(B, 2)
    directory.host.announce(Announcement(B, 1, is_leaving=True))
    directory.clock.advance(HOST_SILENT_S + 1)
    directory.host.expire()
    assert missed() == [(A, 6.0)]
    directory.clock.advance(60.0)
    assert missed() == [(A, 66.0)]
    directory.say(A, 1)
    assert missed() == []
    directory.clock.advance(HOST_SILENT_S)
    directory.host.expire()
    directory.clock.advance(directory_host.MISSED_S)
    assert missed() == []


def test_only_the_last_of_many_missed_hosts_are_kept(directory: Directory) -> None:
    hosts = [f"10.0.1.{number}:1" for number in range(directory_host.HOSTS_MISSED_MAX + 5)]
    for host in hosts:
        directory.say(host)
    directory.clock.advance(HOST_SILENT_S)
    directory.host.expire()
    listed = directory.host.describe()["hosts_missed"]
    assert [one["address"] for one in listed] == hosts[5:]


def test_nobody_is_silent_while_the_part_itself_stood_still(directory: Directory) -> None:
    directory.say(A, 1)
    directory.clock.advance(60.0)
    directory.host.forgive(60.0)
    directory.host.expire()
    assert directory.where(1) == [A]


def test_entries_expire_while_their_host_speaks(directory: Directory) -> None:
    directory.say(A, 1)
    for _ in range(181):
        directory.clock.advance(1.0)
        directory.say(A)
        directory.host.expire()
    assert directory.where(1) == [None]
    assert directory.host.entries == 0


def test_withdrawal_by_another_takes_that_entry_and_no_more(directory: Directory) -> None:
    directory.say(A, 1, 2)
    directory.say(B, 1)
    stale = Announcement(A, 0, items=[AnnouncedItem(key_of(1), 0, 0)])
    assert not directory.host.announce(stale).is_new
    assert directory.where(1, 2) == [B, A]
    # It is no sign of life.
    directory.clock.advance(HOST_SILENT_S + 0.1)
    directory.host.announce(stale)
    directory.host.expire()
    assert directory.where(1, 2) == [None, None]


def test_hosts_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_host, "HOSTS_MAX", 2)
    directory.say(A)
    directory.say(B)
    with pytest.raises(InvalidArgument, match="at most 2 hosts"):
        directory.say("10.0.0.3:7000")
    directory.say(A)
    directory.host.announce(Announcement(A, 1, is_leaving=True))
    directory.say("10.0.0.3:7000")


def test_description_names_the_hosts(directory: Directory) -> None:
    directory.say(B, 1, 2)
    directory.say(A)
    described = directory.host.describe()
    assert described["hosts_seen"] == [
        {"address": A, "records": 0},
        {"address": B, "records": 2},
    ]
    assert described["entries"] == 2
