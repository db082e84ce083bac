"""What is kept for how long: the policy that all nodes of a cluster share, as one document.

Pure: from bytes to a checked value, from one version to the next, and back to bytes. Each change
gives a new document with the next version and a line in its log; nothing is changed in place. How
documents travel between nodes, and where they are kept, is not decided here. The format stands in
docs/formats/policy.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from xxhash import xxh3_64_intdigest

from .errors import InvalidArgument, shown
from .retention_rules import (
    CHAT_CLASS,
    DRAINING_MAX,
    LOG_ENTRIES_MAX,
    POLICY_BYTES_MAX,
    POLICY_FORMAT,
    VERSION_MAX,
    WHO_BYTES_MAX,
    WHY_BYTES_MAX,
    Watermarks,
    check_class,
    check_draining_count,
    check_fields,
    check_list,
    check_node,
    check_object,
    check_text,
    check_ttl,
    check_whole,
    checked_ttls,
)
from .settings import SettingValue, check_setting, hot_setting

_WHAT_PATTERN = re.compile(r"(ttl_s|settings|draining)\.[A-Za-z0-9._-]{1,32}|watermarks")

Scalar = int | float | bool | None
LogValue = Scalar | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One change: who made it, when, of what, from which value to which, and why.

    `what` is `ttl_s.CLASS`, `watermarks`, `settings.NAME` or `draining.NODE`. `before` and `after`
    are None where the class or setting was not listed. `undoes` is the version of the change that
    this one takes back.
    """

    version: int
    at_s: int
    who: str
    what: str
    before: LogValue
    after: LogValue
    why: str
    undoes: int | None = None

    def to_values(self) -> dict[str, object]:
        """The entry as the document has it."""
        values: dict[str, object] = {
            "version": self.version,
            "at_s": self.at_s,
            "who": self.who,
            "what": self.what,
            "from": dict(self.before) if isinstance(self.before, Mapping) else self.before,
            "to": dict(self.after) if isinstance(self.after, Mapping) else self.after,
            "why": self.why,
        }
        if self.undoes is not None:
            values["undoes"] = self.undoes
        return values


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """One version of the policy. Made by `parse`, by `DEFAULT_POLICY` and by the `with_*` methods.

    `settings` holds what was set; `setting` gives the default for the rest.
    """

    version: int
    ttl_s: Mapping[str, int]
    watermarks: Watermarks = field(default_factory=Watermarks)
    settings: Mapping[str, SettingValue] = field(default_factory=lambda: MappingProxyType({}))
    draining: frozenset[str] = frozenset()
    log: tuple[LogEntry, ...] = ()

    @staticmethod
    def parse(document: bytes | bytearray | memoryview) -> RetentionPolicy:
        """The policy in a document; InvalidArgument names the rule that the document breaks."""
        return _parse(bytes(document))

    def to_json(self) -> bytes:
        """The canonical document: equal policies give equal bytes, at most POLICY_BYTES_MAX."""
        return self._document

    def to_values(self) -> dict[str, object]:
        """The document as values that `json` can write."""
        return {
            "format": POLICY_FORMAT,
            "version": self.version,
            "ttl_s": dict(sorted(self.ttl_s.items())),
            "watermarks": self.watermarks.to_values(),
            "settings": dict(sorted(self.settings.items())),
            "draining": sorted(self.draining),
            "log": [entry.to_values() for entry in self.log],
        }

    @cached_property
    def _document(self) -> bytes:
        text = json.dumps(
            self.to_values(), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        return text.encode()

    @cached_property
    def digest(self) -> int:
        """xxh3-64 of the canonical document; decides between two documents of one version."""
        return xxh3_64_intdigest(self._document)

    def is_newer_than(self, other: RetentionPolicy) -> bool:
        """Whether this one replaces `other` everywhere: a higher version, then a higher digest."""
        return (self.version, self.digest) > (other.version, other.digest)

    def ttl_of(self, ttl_class: str) -> int:
        """Seconds after its last use at which a block of the class expires."""
        return self.ttl_s.get(ttl_class, self.ttl_s[CHAT_CLASS])

    def setting(self, name: str) -> SettingValue:
        """The value in force of a hot setting; InvalidArgument for any other name."""
        setting = hot_setting(name)
        assert not isinstance(setting.default, str)
        return self.settings.get(name, setting.default)

    def with_ttl(
        self, ttl_class: str, ttl_s: int, *, who: str, why: str, at_s: int, is_new: bool = False
    ) -> RetentionPolicy:
        """The next version, with another TTL for a class; this one if it has that already.

        A class that is not listed is refused unless `is_new` says that it is meant: a typing
        mistake would otherwise make a class that no block has.
        """
        check_class(ttl_class)
        if ttl_class not in self.ttl_s and not is_new:
            raise InvalidArgument(
                "TTL class",
                given=shown(ttl_class),
                expected=f"one of {', '.join(sorted(self.ttl_s))}, or say that the class is new"
                " (`--new`, in JSON `is_new`)",
            )
        changed = {**self.ttl_s, ttl_class: check_ttl(ttl_class, ttl_s)}
        if changed == self.ttl_s:
            return self
        entry = self._entry(
            f"ttl_s.{ttl_class}", self.ttl_s.get(ttl_class), ttl_s, who=who, why=why, at_s=at_s
        )
        return replace(self, ttl_s=checked_ttls(changed))._next(entry)

    def with_watermarks(
        self, *, high: float, low: float, who: str, why: str, at_s: int
    ) -> RetentionPolicy:
        """The next version, with other watermarks; this one if it has these already."""
        marks = Watermarks(high=high, low=low)
        if marks == self.watermarks:
            return self
        before, after = self.watermarks.to_values(), marks.to_values()
        entry = self._entry("watermarks", before, after, who=who, why=why, at_s=at_s)
        return replace(self, watermarks=marks)._next(entry)

    def with_setting(
        self, name: str, value: SettingValue | None, *, who: str, why: str, at_s: int
    ) -> RetentionPolicy:
        """The next version, with another value of a hot setting; this one if that is in force.

        None brings the default back, and follows it if a later release has another.
        """
        now, before = self.setting(name), self.settings.get(name)
        checked = None if value is None else check_setting(name, value)
        if checked == (before if value is None else now):
            return self
        entry = self._entry(f"settings.{name}", before, checked, who=who, why=why, at_s=at_s)
        rest = {other: kept for other, kept in self.settings.items() if other != name}
        changed = rest if checked is None else {**rest, name: checked}
        return replace(self, settings=MappingProxyType(changed))._next(entry)

    def with_draining(
        self, node: str, is_draining: bool, *, who: str, why: str, at_s: int
    ) -> RetentionPolicy:
        """The next version, in which `node` takes no more writes, or takes them again.

        This one if that is so already.
        """
        check_node(node)
        was = node in self.draining
        if was == is_draining:
            return self
        changed = self.draining | {node} if is_draining else self.draining - {node}
        check_draining_count(len(changed))
        entry = self._entry(f"draining.{node}", was, is_draining, who=who, why=why, at_s=at_s)
        return replace(self, draining=changed)._next(entry)

    def undo(self, *, who: str, why: str, at_s: int) -> RetentionPolicy:
        """The next version, without the newest change that has not been taken back yet.

        Undoing again goes one change further back. InvalidArgument if the log has none left.
        """
        undone = {entry.undoes for entry in self.log}
        candidates = (
            entry
            for entry in reversed(self.log)
            if entry.undoes is None and entry.version not in undone
        )
        found = next(candidates, None)
        if found is None:
            raise InvalidArgument(
                "undo", given="a log without a change to take back", expected="a change in the log"
            )
        entry = self._entry(found.what, found.after, found.before, who=who, why=why, at_s=at_s)
        restored = replace(self, **self._restored(found))
        policy = restored._next(replace(entry, undoes=found.version))
        # The values come out of a log that another node may have written.
        return RetentionPolicy.parse(policy.to_json())

    def _restored(self, entry: LogEntry) -> dict[str, Any]:
        kind, _, name = entry.what.partition(".")
        value = entry.before
        if kind == "watermarks":
            assert isinstance(value, Mapping)
            return {kind: Watermarks(**value)}
        if kind == "draining":
            return {kind: self.draining | {name} if value else self.draining - {name}}
        values: dict[str, Any] = dict(getattr(self, kind))
        values.pop(name, None)
        return {kind: MappingProxyType(values if value is None else {**values, name: value})}

    def _entry(
        self,
        what: str,
        before: LogValue,
        after: LogValue,
        *,
        who: str,
        why: str,
        at_s: int,
    ) -> LogEntry:
        if self.version >= VERSION_MAX:
            raise InvalidArgument(
                "policy version", given=self.version, expected=f"less than {VERSION_MAX}"
            )
        return LogEntry(
            version=self.version + 1,
            at_s=check_whole("at_s", at_s, 0, 2**40),
            who=check_text("who", who, WHO_BYTES_MAX),
            what=what,
            before=before,
            after=after,
            why=check_text("why", why, WHY_BYTES_MAX, is_empty_ok=True),
        )

    def _next(self, entry: LogEntry) -> RetentionPolicy:
        log = (*self.log, entry)[-LOG_ENTRIES_MAX:]
        policy = replace(self, version=entry.version, log=log)
        while len(policy.to_json()) > POLICY_BYTES_MAX:
            policy = replace(policy, log=policy.log[1:])
        return policy


def _parse(document: bytes) -> RetentionPolicy:
    if len(document) > POLICY_BYTES_MAX:
        raise InvalidArgument(
            "policy document",
            given=f"{len(document)} bytes",
            expected=f"at most {POLICY_BYTES_MAX}",
        )
    try:
        values = json.loads(document.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            "policy document", given=f"{error}"[:200], expected="a JSON object in UTF-8"
        ) from error
    values = check_object("policy document", values)
    found = values.get("format")
    if type(found) is not int or found != POLICY_FORMAT:
        raise InvalidArgument("policy format", given=shown(found), expected=str(POLICY_FORMAT))
    check_fields("policy document", values, _FIELDS)
    policy = RetentionPolicy(
        version=check_whole("policy version", values["version"], 0, VERSION_MAX),
        ttl_s=checked_ttls(check_object("ttl_s", values["ttl_s"])),
        watermarks=_parse_watermarks(values["watermarks"]),
        settings=MappingProxyType(
            {
                name: check_setting(name, value)
                for name, value in check_object("settings", values["settings"]).items()
            }
        ),
        draining=_parse_draining(values["draining"]),
        log=_parse_log(values["log"]),
    )
    if policy.log and policy.log[-1].version > policy.version:
        raise InvalidArgument(
            "versions in the log",
            given=policy.log[-1].version,
            expected=f"at most {policy.version}, the document's own",
        )
    if len(policy.to_json()) > POLICY_BYTES_MAX:
        raise InvalidArgument(
            "policy document",
            given=f"{len(policy.to_json())} bytes in its canonical form",
            expected=f"at most {POLICY_BYTES_MAX}",
        )
    return policy


_FIELDS = frozenset({"format", "version", "ttl_s", "watermarks", "settings", "draining", "log"})
_LOG_FIELDS = frozenset({"version", "at_s", "who", "what", "from", "to", "why"})


def _parse_watermarks(given: object) -> Watermarks:
    values = check_object("watermarks", given)
    check_fields("watermarks", values, frozenset({"high", "low"}))
    return Watermarks(high=values["high"], low=values["low"])


def _parse_draining(given: object) -> frozenset[str]:
    names = check_list("draining", given, DRAINING_MAX)
    for name in names:
        check_node(name)
    return frozenset(names)


def _parse_log(given: object) -> tuple[LogEntry, ...]:
    entries = [_parse_entry(entry) for entry in check_list("log", given, LOG_ENTRIES_MAX)]
    versions = [entry.version for entry in entries]
    if versions != sorted(set(versions)):
        raise InvalidArgument(
            "versions in the log", given=shown(versions), expected="each greater than the last"
        )
    return tuple(entries)


def _parse_entry(given: object) -> LogEntry:
    values = check_object("log entry", given)
    check_fields("log entry", values, _LOG_FIELDS, {"undoes"})
    what = values["what"]
    if not isinstance(what, str) or not _WHAT_PATTERN.fullmatch(what):
        raise InvalidArgument(
            "what of a log entry",
            given=shown(what),
            expected="ttl_s.CLASS, watermarks, settings.NAME or draining.NODE",
        )
    undoes = values.get("undoes")
    return LogEntry(
        version=check_whole("version of a log entry", values["version"], 1, VERSION_MAX),
        at_s=check_whole("at_s", values["at_s"], 0, 2**40),
        who=check_text("who", values["who"], WHO_BYTES_MAX),
        what=what,
        before=_parse_log_value(what, values["from"]),
        after=_parse_log_value(what, values["to"]),
        why=check_text("why", values["why"], WHY_BYTES_MAX, is_empty_ok=True),
        undoes=None if undoes is None else check_whole("undoes", undoes, 1, VERSION_MAX),
    )


def _parse_log_value(what: str, value: object) -> LogValue:
    """A value that `what` may have; it is put back by an undo, so it obeys the same rules."""
    kind, _, name = what.partition(".")
    if kind == "watermarks":
        return MappingProxyType(_parse_watermarks(value).to_values())
    if kind == "draining":
        check_node(name)
        if not isinstance(value, bool):
            raise InvalidArgument(what, given=shown(value), expected="true or false")
        return value
    if value is None:
        return None
    if kind == "settings":
        return check_setting(name, value)
    check_class(name)
    return check_ttl(name, value)


DEFAULT_POLICY = RetentionPolicy(
    version=0, ttl_s=MappingProxyType({"agent": 3 * 86_400, "chat": 7 * 86_400})
)
"""What a node obeys that has never seen another document."""
