"""Which engines a folder is to have, with which options, and how they are started and ended."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine_config import EngineConfig
from engine.sinks.threaded_sink import END_S
from engine.worker.assembly import HAND_OVER_CLOSE_S
from engine.worker.main import HAND_OVER_DEADLINE_S, LAST_ANSWERS_S, STOP_DEADLINE_S
from kvstore.admin.engine_plan import (
    AFTER_GRACE_S,
    GRACE_S,
    OPTION_CHARACTERS_MAX,
    EngineWishes,
    add_up_engines,
    choose_engines,
    choose_stop_s,
    name_engines,
    option_words,
    parse_engine_option,
    parse_engines,
    remove_engines,
)
from kvstore.admin.local_engines import check_engines, check_worker_options, engine_command
from kvstore.admin.local_folder import DamagedEngineOptions, LocalEngineOptions, LocalFolder
from kvstore.admin.node_process import ENGINE, is_command_of_node
from kvstore.errors import InvalidArgument, StoreError
from tests.kvstore.admin.command_line import ROOT

MODEL = ROOT / "models" / "v41-mini"


def names_of(options: LocalEngineOptions) -> list[str]:
    return [engine.name for engine in name_engines(options)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("1p1d", ["p01", "d01"]),
        ("2p3d", ["p01", "p02", "d01", "d02", "d03"]),
        ("1b", ["b01"]),
        ("1p1d1b", ["p01", "d01", "b01"]),
    ],
)
def test_engines_are_named_by_role_and_number(text: str, names: list[str]) -> None:
    assert names_of(parse_engines(text)) == names


@pytest.mark.parametrize("text", ["", "0b", "1p", "1d", "0p1d", "1p0d", "b", "1x", "40b", "1d1p"])
def test_text_that_names_no_engines_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--engines: given .* such as 1p1d"):
        parse_engines(text)


def test_engines_can_be_added_and_none_taken_away() -> None:
    known = LocalEngineOptions(model="m", prefill=1, decode=1)
    grown = choose_engines(known, EngineWishes(counts=parse_engines("1p2d")), running=["p01"])
    assert grown == LocalEngineOptions(model="m", prefill=1, decode=2)
    assert choose_engines(known, EngineWishes(), running=[]) == known
    with pytest.raises(InvalidArgument, match=r"p01 would be gone"):
        choose_engines(known, EngineWishes(counts=LocalEngineOptions(decode=1)), running=[])


def test_several_texts_name_engines_together() -> None:
    assert names_of(add_up_engines(["1p1d", "1b"])) == ["p01", "d01", "b01"]
    assert names_of(add_up_engines(["1b", "1p1d", "1b"])) == ["p01", "d01", "b01", "b02"]
    with pytest.raises(InvalidArgument, match="given 20b and 20b, expected at most 32 workers"):
        add_up_engines(["20b", "20b"])


def test_engine_is_removed_from_the_end_of_its_role() -> None:
    known = LocalEngineOptions(model="m", prefill=1, decode=2, both=1)
    left = remove_engines(known, ["d02"])
    assert left == LocalEngineOptions(model="m", prefill=1, decode=1, both=1)
    with pytest.raises(InvalidArgument, match=r"--remove: given d01, expected d02, the last of"):
        remove_engines(known, ["d01"])
    only = LocalEngineOptions(model="m", both=1)
    assert remove_engines(only, ["b01"]) == LocalEngineOptions()


def test_several_engines_are_removed_in_any_order() -> None:
    known = LocalEngineOptions(model="m", prefill=2, decode=3, both=1)
    for names in (["d02", "d03", "p02"], ["p02", "d03", "d02", "d02"]):
        assert names_of(remove_engines(known, names)) == ["p01", "d01", "b01"]
    with pytest.raises(InvalidArgument, match=r"--remove: given d01, expected d02, the last of"):
        remove_engines(known, ["d01", "d03"])
    everything = names_of(known)
    assert remove_engines(known, everything) == LocalEngineOptions()


def test_engine_that_is_none_is_not_removed() -> None:
    known = LocalEngineOptions(model="m", prefill=1, decode=1)
    for names in (["d02"], ["d01", "d02"]):
        with pytest.raises(InvalidArgument, match=r"--engine: given 'd02', .*: p01, d01$"):
            remove_engines(known, names)


def test_decode_worker_is_not_removed_while_others_need_it() -> None:
    known = LocalEngineOptions(model="m", prefill=1, decode=1)
    with pytest.raises(InvalidArgument, match=r"d01, the only decode worker, expected p01 before"):
        remove_engines(known, ["d01"])
    assert names_of(remove_engines(known, ["p01"])) == ["d01"]
    assert remove_engines(known, ["d01", "p01"]) == LocalEngineOptions()


def test_model_changes_only_while_no_engine_runs() -> None:
    known = LocalEngineOptions(model="m", both=1)
    other = EngineWishes(model="other")
    assert choose_engines(known, other, running=[]).model == "other"
    for running, said in ((["b01"], "b01 runs m"), (["b01", "b02"], "b01, b02 run m")):
        with pytest.raises(InvalidArgument, match=f"--model: given other, while {said}"):
            choose_engines(known, other, running=running)
    with pytest.raises(InvalidArgument, match="--model: given nothing"):
        choose_engines(LocalEngineOptions(), EngineWishes(counts=parse_engines("1b")), running=[])


def wish_options(*texts: str) -> EngineWishes:
    return EngineWishes(options=dict(map(parse_engine_option, texts)))


def test_options_of_engines_are_kept_until_they_are_taken_back() -> None:
    known = LocalEngineOptions(model="m", both=1)
    said = choose_engines(known, wish_options("--pool-blocks=64", "must-pin"), running=[])
    assert said.options == {"pool-blocks": "64", "must-pin": None}
    assert option_words(said.options) == ["--pool-blocks=64", "--must-pin"]
    more = choose_engines(said, wish_options("pool-blocks=", "cost=a=b"), running=[])
    assert more.options == {"must-pin": None, "cost": "a=b"}
    assert choose_engines(more, EngineWishes(), running=["b01"]) == more


def test_options_change_only_while_no_engine_runs() -> None:
    known = LocalEngineOptions(model="m", both=1, options={"threads": "1"})
    said = "--engine-option: given --threads=2, while b01 runs --threads=1, expected the same"
    with pytest.raises(InvalidArgument, match=said):
        choose_engines(known, wish_options("threads=2"), running=["b01"])
    grown = EngineWishes(counts=parse_engines("2b"), options={"threads": "1"})
    assert names_of(choose_engines(known, grown, running=["b01"])) == ["b01", "b02"]


def test_metrics_of_several_engines_at_one_place_are_refused() -> None:
    wish = wish_options("metrics=127.0.0.1:9190")
    alone = choose_engines(LocalEngineOptions(model="m", both=1), wish, running=[])
    assert alone.options == {"metrics": "127.0.0.1:9190"}
    said = "--engine-option: given metrics for 2 engines, which cannot all listen there"
    for known, wishes in (
        (LocalEngineOptions(model="m", prefill=1, decode=1), wish),
        (alone, EngineWishes(counts=parse_engines("2b"))),
    ):
        with pytest.raises(InvalidArgument, match=said):
            choose_engines(known, wishes, running=[])
    each_its_own = wish_options("metrics=127.0.0.1:0")
    two = choose_engines(LocalEngineOptions(model="m", both=2), each_its_own, running=[])
    assert two.options == {"metrics": "127.0.0.1:0"}


def test_value_of_an_option_has_a_bound() -> None:
    longest = "0" * OPTION_CHARACTERS_MAX
    assert parse_engine_option(f"threads={longest}") == ("threads", longest)
    with pytest.raises(InvalidArgument, match=r"threads with a value of 4097 characters, expected"):
        parse_engine_option(f"threads={longest}0")


def test_option_that_lacks_its_value_does_not_take_the_next_one_for_it() -> None:
    with pytest.raises(InvalidArgument, match=r"says: Option '--metrics' requires an argument"):
        check_worker_options({"must-pin": None, "metrics": None, "threads": "2"}, model=str(MODEL))


def test_worker_that_cannot_read_its_options_does_not_make_them_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # with which none of our processes starts
    with pytest.raises(StoreError, match="with exit code 1: refusing to start") as caught:
        check_worker_options({"threads": "2"}, model=str(MODEL))
    assert not isinstance(caught.value, InvalidArgument)


@pytest.mark.parametrize(
    ("options", "wait_s", "stop_s"),
    [
        ({}, 20.0, GRACE_S + AFTER_GRACE_S),
        ({"grace": "60"}, 20.0, 60 + AFTER_GRACE_S),
        ({"grace": "0"}, 0.1, AFTER_GRACE_S),
        ({"grace": "60"}, 600.0, 600.0),
        ({"grace": "-1"}, 20.0, GRACE_S + AFTER_GRACE_S),
        ({"grace": "nan"}, 20.0, GRACE_S + AFTER_GRACE_S),
        ({"grace": "soon"}, 20.0, GRACE_S + AFTER_GRACE_S),
        ({"grace": None}, 20.0, GRACE_S + AFTER_GRACE_S),
    ],
)
def test_engines_are_given_the_time_of_their_drain(
    options: Mapping[str, str | None], wait_s: float, stop_s: float
) -> None:
    assert choose_stop_s(options, wait_s) == stop_s


def test_time_after_the_grace_is_enough_for_all_that_a_worker_does_then() -> None:
    of_engine_s = 2 * EngineConfig().close_deadline_s + END_S
    of_worker_s = HAND_OVER_DEADLINE_S + LAST_ANSWERS_S + STOP_DEADLINE_S + 2 * HAND_OVER_CLOSE_S
    assert of_worker_s + of_engine_s <= AFTER_GRACE_S


@pytest.mark.parametrize(
    "text", ["", "=1", "Pool=1", "name=x", "listen=/a", "--help", "role=both", "a b=1"]
)
def test_option_that_up_gives_itself_and_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--engine-option: given .* such as pool-blocks="):
        parse_engine_option(text)


def test_folder_keeps_options_of_engines(tmp_path: Path) -> None:
    place = LocalFolder(tmp_path)
    options = LocalEngineOptions(model="m", both=1, options={"threads": "1", "must-pin": None})
    place.write_engine_options(options)
    assert place.read_engine_options() == options
    before = '{"model": "m", "prefill": 0, "decode": 0, "both": 1}'
    place.engine_options_path.write_text(before)
    assert place.read_engine_options() == LocalEngineOptions(model="m", both=1)


def test_command_line_of_an_engine_is_recognised_and_no_other(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path).of(ENGINE)
    (engine,) = name_engines(parse_engines("1b"))
    options = LocalEngineOptions(model="m", both=1, options={"grace": "9"})
    command = engine_command(folder, engine, options, tmp_path / "a")

    def is_it(name: str) -> bool:
        place = folder.place_path(name)
        return is_command_of_node(command, place_path=place, node=name, program=ENGINE)

    assert is_it("b01")
    assert not is_it("b02")
    assert command[command.index("--ticket-key") + 1] == str(tmp_path / "engines/ticket-key")
    assert command.index("--grace") < command.index("--grace=9")


def test_model_and_paths_are_checked_before_anything_is_started(tmp_path: Path) -> None:
    options = LocalEngineOptions(model=str(tmp_path / "none"), both=1)
    with pytest.raises(InvalidArgument, match=r"--model: given .*none, which is not there"):
        check_engines(LocalFolder(tmp_path).of(ENGINE), options)
    with pytest.raises(InvalidArgument, match=r"config.json: there is no such file; there is no "):
        check_engines(LocalFolder(tmp_path).of(ENGINE), replace(options, model=str(tmp_path)))
    with pytest.raises(InvalidArgument, match=r"test_engine_plan.py, not a readable GGUF file"):
        check_engines(LocalFolder(tmp_path).of(ENGINE), replace(options, model=__file__))
    deep = LocalFolder("/" + "d" * 100).of(ENGINE)
    with pytest.raises(InvalidArgument, match="a Unix socket's may have 107"):
        check_engines(deep, LocalEngineOptions(model=str(MODEL), both=1))


def test_damaged_record_of_engines_is_told_from_a_missing_one(tmp_path: Path) -> None:
    place = LocalFolder(tmp_path)
    assert place.read_engine_options() == LocalEngineOptions()
    options = '{"model": "m", "prefill": 0, "decode": 0, "both": 1, "options": {"threads": 1}}'
    for content in (
        "",
        "[]",
        options,
        '{"model": 1}',
        '{"model": "m", "prefill": -1, "decode": 0}',
    ):
        place.engine_options_path.write_text(content)
        with pytest.raises(DamagedEngineOptions, match=r"engines\.json: damaged \("):
            place.read_engine_options()
