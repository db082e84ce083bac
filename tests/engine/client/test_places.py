"""The workers that a client knows, and where they are."""

import pytest

from engine.client import EnginePlaces, find_places
from engine.client.route import Route
from engine.errors import InvalidRequest
from engine.worker.address import WorkerAddress, parse_address

P1, D1 = (WorkerAddress(host=name, port=1) for name in ("p1", "d1"))


@pytest.mark.parametrize("places", [{}, {"prefill": (P1,)}, {"prefill": (), "both": ()}])
def test_places_without_a_way_to_an_answer_are_refused(
    places: dict[str, tuple[WorkerAddress, ...]],
) -> None:
    with pytest.raises(InvalidRequest, match="at least one of decode or of both"):
        EnginePlaces(**places)


def test_workers_that_decode_are_enough() -> None:
    route = Route(places=EnginePlaces(decode=(D1,)), faults_max=1)
    assert route.next_worker(in_flight={}) == D1


def test_places_are_found_in_a_folder_of_sockets_or_at_an_address(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    for name in ("p01.sock", "p02.sock", "d01.sock", "b01.sock", "p01.sock.lock", "x.sock"):
        (folder / name).touch()
    found = find_places(str(folder))
    roles = (found.prefill, found.decode, found.both)
    names = [[place.path.name for place in role if place.path] for role in roles]
    assert names == [["p01.sock", "p02.sock"], ["d01.sock"], ["b01.sock"]]
    assert find_places("host:80").both == (WorkerAddress(host="host", port=80),)
    with pytest.raises(InvalidRequest, match=r"--engines: given .*, a folder without a socket"):
        find_places(str(tmp_path_factory.mktemp("empty")))


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:65536", "host:-1", "h:1x"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a path with a / in it"):
        parse_address(text)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:0", "[::1]:80", "[fe80::1%eth0]:80", "/a/b.sock", "host.name:65535"]
)
def test_address_is_written_as_it_was_read(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", ["::1", "::1:80", "[::1]", "[:]:1", "[1::2::3]:1"])
def test_ipv6_address_that_cannot_be_told_from_its_port_is_refused_as_written(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_address(text, "--listen")
    assert str(caught.value).startswith(f"--listen: given {text!r}, expected a path")
    assert str(caught.value).endswith("an IPv6 address in brackets: [::1]:PORT")


@pytest.mark.parametrize("text", ["[host]:80", "[host:80", "host]:80", "[]:80"])
def test_brackets_are_of_ipv6_addresses_only(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a path with a / in it"):
        parse_address(text)


def test_address_of_any_length_is_shown_in_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_places("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a path of 201 bytes"):
        parse_address("/" + "d" * 200)
