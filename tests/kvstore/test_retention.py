"""The policy document: what it accepts, how it changes, which of two wins, and its bytes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import retention_rules as rules
from kvstore.cluster.validation import NAME_PATTERN
from kvstore.errors import InvalidArgument
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.retention_rules import Watermarks
from kvstore.settings import SETTINGS, Heat, check_setting
from kvstore.wire import POLICY_BYTES_MAX

GOLDEN = (
    b'{"draining":["n07"],"format":1,"log":['
    b'{"at_s":1000,"from":259200,"to":86400,"version":1,"what":"ttl_s.agent","who":"ada",'
    b'"why":"short runs"},'
    b'{"at_s":2000,"from":false,"to":true,"version":2,"what":"draining.n07","who":"ada","why":""}],'
    b'"settings":{},"ttl_s":{"agent":86400,"chat":604800},"version":2,'
    b'"watermarks":{"high":0.9,"low":0.85}}'
)


def sign(at_s: int = 1000, why: str = "") -> dict[str, Any]:
    return {"who": "ada", "why": why, "at_s": at_s}


def document(**changed: object) -> bytes:
    """The default document with some fields replaced."""
    return json.dumps(DEFAULT_POLICY.to_values() | changed).encode()


def values_of(policy: RetentionPolicy) -> dict[str, Any]:
    """The document as JSON has it."""
    values: dict[str, Any] = json.loads(policy.to_json())
    return values


def test_default_policy_keeps_agents_three_days_and_chats_seven() -> None:
    assert DEFAULT_POLICY.version == 0
    assert DEFAULT_POLICY.ttl_of("agent") == 3 * 86_400
    assert DEFAULT_POLICY.ttl_of("chat") == 7 * 86_400
    assert DEFAULT_POLICY.watermarks == Watermarks(high=0.90, low=0.85)
    assert DEFAULT_POLICY.setting("evict_bytes_per_s") == 1 << 30
    assert DEFAULT_POLICY.setting("repair_is_on") is True


def test_class_that_is_not_listed_has_the_ttl_of_chat() -> None:
    policy = DEFAULT_POLICY.with_ttl("chat", 77, **sign())
    assert policy.ttl_of("batch") == 77


def test_document_is_canonical_and_comes_back_the_same() -> None:
    policy = DEFAULT_POLICY.with_ttl("agent", 86_400, **sign(why="short runs"))
    policy = policy.with_draining("n07", True, **sign(2000))
    assert policy.to_json() == GOLDEN
    assert RetentionPolicy.parse(GOLDEN) == policy
    assert RetentionPolicy.parse(json.dumps(json.loads(GOLDEN), indent=3).encode()) == policy


def test_each_change_is_a_version_with_its_line_in_the_log() -> None:
    policy = DEFAULT_POLICY.with_ttl("agent", 60, **sign(5, why="test"))
    policy = policy.with_watermarks(high=0.8, low=0.7, **sign(6))
    policy = policy.with_setting("scrub_is_on", False, **sign(7))
    policy = policy.with_draining("n03", True, **sign(8))
    assert policy.version == 4
    assert [(entry.version, entry.what) for entry in policy.log] == [
        (1, "ttl_s.agent"),
        (2, "watermarks"),
        (3, "settings.scrub_is_on"),
        (4, "draining.n03"),
    ]
    assert (policy.log[0].before, policy.log[0].after) == (259_200, 60)
    assert (policy.log[0].who, policy.log[0].at_s, policy.log[0].why) == ("ada", 5, "test")
    assert policy.setting("scrub_is_on") is False
    assert policy.draining == {"n03"}
    assert DEFAULT_POLICY.version == 0, "a change makes another document"


def test_undo_takes_changes_back_one_by_one_and_is_itself_a_change() -> None:
    policy = DEFAULT_POLICY.with_ttl("batch", 60, is_new=True, **sign())
    policy = policy.with_setting("hot_within_s", 5, **sign())
    policy = policy.with_watermarks(high=0.5, low=0.4, **sign()).with_draining("n1", True, **sign())
    for number in range(4):
        policy = policy.undo(**sign(2000 + number))
        assert policy.log[-1].undoes == 4 - number
    assert policy.version == 8
    assert policy.ttl_s == DEFAULT_POLICY.ttl_s
    assert policy.watermarks == DEFAULT_POLICY.watermarks
    assert policy.settings == {}
    assert policy.draining == frozenset()
    with pytest.raises(InvalidArgument, match="a change in the log"):
        policy.undo(**sign())


def test_undo_goes_on_before_a_later_change() -> None:
    policy = DEFAULT_POLICY.with_ttl("agent", 1, **sign()).with_ttl("agent", 2, **sign())
    policy = policy.undo(**sign()).with_ttl("agent", 3, **sign())
    assert policy.undo(**sign()).ttl_of("agent") == 1
    assert policy.undo(**sign()).undo(**sign()).ttl_of("agent") == 259_200


def test_window_states_live_three_minutes_unless_the_policy_says_otherwise() -> None:
    assert DEFAULT_POLICY.setting("window_ttl_s") == 180
    changed = DEFAULT_POLICY.with_setting("window_ttl_s", 600, **sign())
    assert RetentionPolicy.parse(changed.to_json()).setting("window_ttl_s") == 600
    assert changed.with_setting("window_ttl_s", None, **sign()).setting("window_ttl_s") == 180


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda p: p.with_ttl("agent", 0, **sign()), "a whole number of seconds from 1 to"),
        (lambda p: p.with_ttl("agent", 1.5, **sign()), "a whole number of seconds from 1 to"),
        (lambda p: p.with_ttl("agent", True, **sign()), "a whole number of seconds from 1 to"),
        (lambda p: p.with_ttl("agent", 10**10, **sign()), "a whole number of seconds from 1 to"),
        (lambda p: p.with_ttl("agnt", 60, **sign()), "one of agent, chat, or say that the class"),
        (lambda p: p.with_ttl("No", 60, is_new=True, **sign()), "1 to 16 of a-z"),
        (lambda p: p.with_watermarks(high=0.5, low=0.6, **sign()), "0 < low < high < 1"),
        (lambda p: p.with_watermarks(high=0.5, low=0.5, **sign()), "0 < low < high < 1"),
        (lambda p: p.with_watermarks(high=1.0, low=0.5, **sign()), "0 < low < high < 1"),
        (lambda p: p.with_watermarks(high=0.5, low=0, **sign()), "0 < low < high < 1"),
        (lambda p: p.with_watermarks(high=float("nan"), low=0.1, **sign()), "0 < low < high < 1"),
        (lambda p: p.with_setting("scrub", True, **sign()), "one of evict_bytes_per_s"),
        (lambda p: p.with_setting("sync", 1, **sign()), "start kvstored anew"),
        (lambda p: p.with_setting("scrub_is_on", 1, **sign()), "true or false"),
        (lambda p: p.with_setting("ttl_interval_s", True, **sign()), "a whole number of seconds"),
        (lambda p: p.with_setting("ttl_interval_s", 0, **sign()), "from 1 to 86400"),
        (lambda p: p.with_setting("window_ttl_s", 0, **sign()), "of seconds from 1 to 86400"),
        (lambda p: p.with_setting("window_ttl_s", 86_401, **sign()), "of seconds from 1 to 86400"),
        (lambda p: p.with_setting("window_ttl_s", 60.5, **sign()), "a whole number of seconds"),
        (lambda p: p.with_draining("../x", True, **sign()), "1 to 32 of A-Z"),
        (lambda p: p.with_ttl("agent", 1, who="", why="", at_s=1), "printable text of 1 to 64"),
        (lambda p: p.with_ttl("agent", 1, who="a\nb", why="", at_s=1), "on one line"),
        (lambda p: p.with_ttl("agent", 1, who="a", why="x" * 201, at_s=1), "0 to 200 bytes"),
        (lambda p: p.with_ttl("agent", 1, who="a", why="", at_s=-1), "from 0 to"),
    ],
)
def test_nonsense_is_refused_with_the_rule_that_it_breaks(
    change: Callable[[Any], object], rule: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        change(DEFAULT_POLICY)
    assert rule in caught.value.expected


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "a JSON object in UTF-8"),
        (b"\xff", "a JSON object in UTF-8"),
        (b"[]", "a JSON object"),
        (b"[" * 50_000, "a JSON object in UTF-8"),
        (b'{"format":1', "a JSON object in UTF-8"),
        (b" " * 70_000, "at most 65536"),
        (document(format=2), "1"),
        (document(format=True), "1"),
        (document(extra=1), "draining, format, log"),
        (document(version=-1), "a whole number from 0"),
        (document(version=2**32), "a whole number from 0"),
        (document(ttl_s={"agent": 5}), "the class 'chat' among them"),
        (document(ttl_s={"chat": 0}), "a whole number of seconds"),
        (document(ttl_s={"chat": 5} | {f"c{i}": 5 for i in range(64)}), "at most 64"),
        (document(watermarks={"high": 0.9}), "high, low"),
        (document(watermarks={"high": 0.1, "low": 0.9}), "0 < low < high < 1"),
        (document(settings={"memory": 5}), "start kvstored anew"),
        (document(draining="n1"), "a JSON list"),
        (document(draining=[f"n{i}" for i in range(65)]), "a JSON list of at most 64"),
        (document(draining=[5]), "1 to 32 of A-Z"),
        (document(log=[{}]), "at_s, from, to"),
        (document(log=[{"version": 1}] * 101), "a JSON list of at most 100"),
    ],
)
def test_document_that_breaks_a_rule_is_refused(content: bytes, rule: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RetentionPolicy.parse(content)
    assert rule in caught.value.expected


@pytest.mark.parametrize(
    "changed",
    [
        {"what": "nothing"},
        {"what": "settings.memory"},
        {"from": 0},
        {"to": "60"},
        {"who": ""},
        {"undoes": 0},
        {"version": 9},
        {"more": 1},
    ],
)
def test_log_entry_that_an_undo_could_not_use_is_refused(changed: dict[str, object]) -> None:
    values = values_of(DEFAULT_POLICY.with_ttl("agent", 60, **sign()))
    (entry,) = values["log"]
    RetentionPolicy.parse(json.dumps(values).encode())
    values["log"] = [entry | changed]
    with pytest.raises(InvalidArgument):
        RetentionPolicy.parse(json.dumps(values).encode())


def test_undo_cannot_take_away_the_class_that_all_others_follow() -> None:
    values = values_of(DEFAULT_POLICY.with_ttl("chat", 60, **sign()))
    (entry,) = values["log"]
    values["log"] = [entry | {"from": None}]
    policy = RetentionPolicy.parse(json.dumps(values).encode())
    with pytest.raises(InvalidArgument, match="the class 'chat' among them"):
        policy.undo(**sign())


def test_newer_is_the_higher_version_and_of_equal_ones_the_same_everywhere() -> None:
    first = DEFAULT_POLICY.with_ttl("agent", 60, **sign())
    second = DEFAULT_POLICY.with_ttl("agent", 61, **sign())
    assert first.is_newer_than(DEFAULT_POLICY)
    assert not DEFAULT_POLICY.is_newer_than(first)
    assert first.is_newer_than(second) is not second.is_newer_than(first)
    assert not first.is_newer_than(RetentionPolicy.parse(first.to_json()))
    winner = max(first, second, key=lambda policy: policy.digest)
    loser = min(first, second, key=lambda policy: policy.digest)
    assert winner.is_newer_than(loser)
    assert loser.with_ttl("chat", 5, **sign()).is_newer_than(winner)


def test_log_and_document_stay_within_their_bounds() -> None:
    policy = DEFAULT_POLICY
    # Quotes take two bytes each in JSON, so that the text of 100 entries is longer than allowed.
    for number in range(250):
        policy = policy.with_ttl("agent", number + 1, who='"' * 64, why='"' * 200, at_s=number)
        assert len(policy.to_json()) <= POLICY_BYTES_MAX
    assert 50 < len(policy.log) <= rules.LOG_ENTRIES_MAX
    assert policy.log[-1].version == policy.version == 250
    assert RetentionPolicy.parse(policy.to_json()) == policy


def test_versions_do_not_run_over() -> None:
    policy = RetentionPolicy.parse(document(version=2**32 - 1))
    with pytest.raises(InvalidArgument, match="less than 4294967295"):
        policy.with_ttl("agent", 60, **sign())


CHANGES = st.one_of(
    st.tuples(st.just("ttl"), st.sampled_from(["agent", "chat", "b"]), st.integers(1, 10**8)),
    st.tuples(st.just("mark"), st.floats(0.5, 0.99), st.floats(0.01, 0.49)),
    st.tuples(st.just("setting"), st.just("hot_within_s"), st.none() | st.integers(1, 1000)),
    st.tuples(st.just("drain"), st.sampled_from(["n1", "n2"]), st.booleans()),
    st.tuples(st.just("undo"), st.just(0), st.just(0)),
)


def apply(policy: RetentionPolicy, change: tuple[Any, Any, Any]) -> RetentionPolicy:
    kind, first, second = change
    if kind == "ttl":
        return policy.with_ttl(first, second, is_new=True, **sign())
    if kind == "mark":
        return policy.with_watermarks(high=first, low=second, **sign())
    if kind == "setting":
        return policy.with_setting(first, second, **sign())
    if kind == "drain":
        return policy.with_draining(first, second, **sign())
    return policy.undo(**sign())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.with_ttl("agent", 259_200, **sign()),
        lambda p: p.with_watermarks(high=0.9, low=0.85, **sign()),
        lambda p: p.with_setting("hot_within_s", 86_400, **sign()),
        lambda p: p.with_setting("hot_within_s", None, **sign()),
        lambda p: p.with_draining("n1", False, **sign()),
    ],
)
def test_change_to_what_is_so_already_makes_no_version(change: Callable[[Any], object]) -> None:
    assert change(DEFAULT_POLICY) is DEFAULT_POLICY


def test_setting_goes_back_to_its_default_and_undo_brings_the_value_back() -> None:
    changed = DEFAULT_POLICY.with_setting("hot_within_s", 60, **sign())
    back = changed.with_setting("hot_within_s", None, **sign())
    assert (back.version, dict(back.settings), back.setting("hot_within_s")) == (2, {}, 86_400)
    assert (back.log[-1].before, back.log[-1].after) == (60, None)
    assert RetentionPolicy.parse(back.to_json()) == back
    assert back.undo(**sign()).setting("hot_within_s") == 60
    with pytest.raises(InvalidArgument, match="one of evict_bytes_per_s"):
        DEFAULT_POLICY.with_setting("nonsense", None, **sign())


@given(st.lists(CHANGES, max_size=30))
def test_any_sequence_of_changes_gives_a_valid_document_that_undo_unrolls(
    changes: list[tuple[Any, Any, Any]],
) -> None:
    policy = DEFAULT_POLICY
    history = [policy]
    for change in changes:
        try:
            made = apply(policy, change)
        except InvalidArgument:
            continue
        if made is policy:
            continue
        assert made.version == policy.version + 1
        assert made.is_newer_than(policy)
        assert RetentionPolicy.parse(made.to_json()) == made
        history = history[:-1] if change[0] == "undo" else [*history, made]
        policy = made
        expected = history[-1]
        assert (policy.ttl_s, policy.watermarks) == (expected.ttl_s, expected.watermarks)
        assert (policy.settings, policy.draining) == (expected.settings, expected.draining)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_a_policy_or_refused(content: bytes) -> None:
    try:
        policy = RetentionPolicy.parse(content)
    except InvalidArgument:
        return
    assert RetentionPolicy.parse(policy.to_json()) == policy


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(DEFAULT_POLICY.to_values())), JSON_VALUES)
def test_any_value_in_any_field_is_taken_or_refused(name: str, value: object) -> None:
    try:
        policy = RetentionPolicy.parse(document(**{name: value}))
    except InvalidArgument:
        return
    assert RetentionPolicy.parse(policy.to_json()) == policy


def test_limits_agree_with_those_of_the_wire_and_the_map() -> None:
    assert rules.POLICY_BYTES_MAX == POLICY_BYTES_MAX
    assert rules._NODE_PATTERN.pattern == NAME_PATTERN.pattern


def test_every_setting_obeys_its_own_rule_and_says_what_it_is_for() -> None:
    for setting in SETTINGS.values():
        assert setting.what_for
        assert setting.unit
        if setting.heat is Heat.HOT:
            assert check_setting(setting.name, setting.default) == setting.default
        if setting.heat is Heat.HOT and not setting.is_switch:
            assert setting.low <= setting.high
            for value in (setting.low - 1, setting.high + 1, "1", None, 1.0):
                with pytest.raises(InvalidArgument):
                    check_setting(setting.name, value)
