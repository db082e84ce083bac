"""Which engine workers a local cluster is to have: pure decisions, nothing is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import InvalidArgument, shown
from .local_folder import LocalEngineOptions, LocalFolder

ENGINES_MAX = 32
"""Processes with a model each on one machine; more than that belongs on more machines."""
OWN_OPTIONS = frozenset(
    {"agent", "check-only", "help", "listen", "model", "name", "role", "ticket-key"}
)
"""Of `cachalot engine`, which `up` gives each engine itself, or which serve nobody."""
OPTION_CHARACTERS_MAX = 4096
"""Of a value: no path is longer, and all of them together fit into engines.json."""
GRACE_S = 5.0
"""A drain of one machine's engines leads nowhere else: what runs may end, and no more."""
GRACE_S_MAX = 86_400.0
AFTER_GRACE_S = 70.0
"""From the end of its grace until a worker has ended: as long as its own deadlines are together,
for hand-overs, last answers, the step that runs, and what is still to be saved."""
SPEC_EXPECTED = "such as 1p1d (1 prefill, 1 decode worker), 2p2d, or 1b (1 worker that does both)"


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine worker of the folder. Its name begins with the letter of its role."""

    name: str
    role: str
    """As `cachalot engine --role` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWishes:
    """What a caller asked for; None, or nothing, where it said nothing."""

    counts: LocalEngineOptions | None = None
    """How many of each role."""
    model: str | None = None
    options: Mapping[str, str | None] = field(default_factory=dict)
    """As in LocalEngineOptions; an empty value takes the option back."""

    @property
    def are_any(self) -> bool:
        """Whether anything was said."""
        return self.counts is not None or self.model is not None or bool(self.options)


def parse_engines(text: str) -> LocalEngineOptions:
    """How many engines of each role, from "1p1d". Raises InvalidArgument."""
    found = re.fullmatch(r"(?:([0-9]{1,2})p([0-9]{1,2})d)?(?:([0-9]{1,2})b)?", text.strip())
    prefill, decode, both = (int(digits or 0) for digits in found.groups()) if found else (0, 0, 0)
    is_whole = bool(prefill) == bool(decode) and prefill + decode + both > 0
    if not is_whole or prefill + decode + both > ENGINES_MAX:
        expected = f"{SPEC_EXPECTED}; at most {ENGINES_MAX} workers"
        raise InvalidArgument("--engines", given=shown(text), expected=expected)
    return LocalEngineOptions(prefill=prefill, decode=decode, both=both)


def add_up_engines(texts: Sequence[str]) -> LocalEngineOptions:
    """How many engines of each role all of these texts name together. Raises InvalidArgument."""
    counts = [parse_engines(text) for text in texts]
    total = LocalEngineOptions(
        prefill=sum(one.prefill for one in counts),
        decode=sum(one.decode for one in counts),
        both=sum(one.both for one in counts),
    )
    if len(name_engines(total)) > ENGINES_MAX:
        expected = f"at most {ENGINES_MAX} workers"
        raise InvalidArgument("--engines", given=" and ".join(texts), expected=expected)
    return total


def parse_engine_option(text: str) -> tuple[str, str | None]:
    """Name and value of an option, from "pool-blocks=1024"; no value for "must-pin".

    Raises InvalidArgument for text that names none, or one that `up` itself gives.
    """
    word, separator, value = text.strip().partition("=")
    name = word.removeprefix("--")
    if not re.fullmatch(r"[a-z][a-z-]{0,31}", name) or name in OWN_OPTIONS:
        raise InvalidArgument(
            "--engine-option",
            given=shown(text),
            expected="NAME=VALUE, such as pool-blocks=1024, of an option of `cachalot engine` that"
            f" is none of {', '.join(sorted(OWN_OPTIONS))}",
        )
    if len(value) > OPTION_CHARACTERS_MAX:
        raise InvalidArgument(
            "--engine-option",
            given=f"{name} with a value of {len(value)} characters",
            expected=f"at most {OPTION_CHARACTERS_MAX}",
        )
    return name, value if separator else None


def option_words(options: Mapping[str, str | None]) -> list[str]:
    """The same on a command line."""
    return [f"--{name}" + ("" if value is None else f"={value}") for name, value in options.items()]


def name_engines(options: LocalEngineOptions) -> list[LocalEngine]:
    """p01, p02, then d01 and so on."""
    roles = (("prefill", options.prefill), ("decode", options.decode), ("both", options.both))
    return [
        LocalEngine(f"{role[0]}{number:02}", role)
        for role, count in roles
        for number in range(1, count + 1)
    ]


def choose_stop_s(options: Mapping[str, str | None], wait_s: float) -> float:
    """How long after SIGTERM engines with these options have, where other processes have `wait_s`:
    never less than a drain may take."""
    return max(wait_s, _read_grace_s(options) + AFTER_GRACE_S)


def _read_grace_s(options: Mapping[str, str | None]) -> float:
    try:
        grace_s = float(options.get("grace") or GRACE_S)
    except ValueError:
        return GRACE_S  # as somebody has written it by hand; no engine runs with it
    return grace_s if 0 <= grace_s <= GRACE_S_MAX else GRACE_S


ENGINE_NAMES = frozenset(
    engine.name
    for engine in name_engines(
        LocalEngineOptions(prefill=ENGINES_MAX, decode=ENGINES_MAX, both=ENGINES_MAX)
    )
)
"""All that an engine of a folder can be called."""


def check_is_no_engine(folder: LocalFolder, node: str, nodes: Container[str]) -> None:
    """Raises InvalidArgument for an engine of the folder where the name of a node belongs; what is
    a node needs no file of engines."""
    if node in nodes:
        return
    if node in [engine.name for engine in name_engines(folder.read_engine_options())]:
        where = shlex.quote(str(folder.path))
        raise InvalidArgument(
            "node",
            given=f"{node}, which is an engine",
            expected=f"a node; `cachalot down --dir {where} --engine {node}` drains and stops"
            " an engine",
        )


def choose_engines(
    known: LocalEngineOptions, wishes: EngineWishes, *, running: Sequence[str]
) -> LocalEngineOptions:
    """What a folder is to have that has `known` and of it `running`, after what was asked for now.

    Engines can be added so, and none taken away; another model and other options are for engines
    that are down. Raises InvalidArgument.
    """
    counts = known if wishes.counts is None else wishes.counts
    wanted = replace(
        counts, model=wishes.model or known.model, options=choose_options(known.options, wishes)
    )
    known_names = {engine.name for engine in name_engines(known)}
    lost = sorted(known_names - {engine.name for engine in name_engines(wanted)})
    if lost:
        raise InvalidArgument(
            "--engines",
            given=f"fewer than the cluster has ({', '.join(lost)} would be gone)",
            expected="as many or more of each role; `cachalot down --engine NAME --remove` takes"
            " one away",
        )
    _check_same_for_all(known, wanted, running)
    count = len(name_engines(wanted))
    if not count:
        raise InvalidArgument("--engines", given="nothing", expected=SPEC_EXPECTED)
    port = (wanted.options.get("metrics") or "").rpartition(":")[2]
    if "metrics" in wanted.options and count > 1 and port != "0":
        raise InvalidArgument(
            "--engine-option",
            given=f"metrics for {count} engines, which cannot all listen there",
            expected="it for one engine only, or port 0: a free one for each",
        )
    if not wanted.model:
        raise InvalidArgument(
            "--model", given="nothing", expected="a GGUF file, or a folder with config.json"
        )
    return wanted


def choose_options(known: Mapping[str, str | None], wishes: EngineWishes) -> dict[str, str | None]:
    """The options of engines that had `known`, after what was asked for now."""
    merged = {**known, **wishes.options}
    return {name: value for name, value in merged.items() if value != ""}


def _check_same_for_all(
    known: LocalEngineOptions, wanted: LocalEngineOptions, running: Sequence[str]
) -> None:
    """Raises InvalidArgument if those that run would differ from those that are started."""
    if not running:
        return
    verb = "runs" if len(running) == 1 else "run"
    given, has, what = wanted.model, known.model, "--model"
    if given == has:
        given, has = (" ".join(option_words(one.options)) or "none" for one in (wanted, known))
        what = "--engine-option"
    if given != has:
        raise InvalidArgument(
            what,
            given=f"{given}, while {', '.join(running)} {verb} {has}",
            expected="the same, or no engine that runs",
        )


def check_are_engines(known: LocalEngineOptions, names: Sequence[str]) -> None:
    """Raises InvalidArgument for a name that none of the folder's engines has."""
    has = [engine.name for engine in name_engines(known)]
    for name in names:
        if name not in has:
            expected = f"one of the cluster: {', '.join(has) or 'it has none'}"
            raise InvalidArgument("--engine", given=shown(name), expected=expected)


def remove_engines(known: LocalEngineOptions, names: Sequence[str]) -> LocalEngineOptions:
    """What a folder is to have that had `known`, without the engines `names`, in any order.

    Raises InvalidArgument for one that it does not have, that others are not to be without, or
    whose number would be left out: the last of its role goes first.
    """
    check_are_engines(known, names)
    for name in sorted(set(names), reverse=True):
        known = _remove_engine(known, name)
    return known if name_engines(known) else LocalEngineOptions()


def _remove_engine(known: LocalEngineOptions, name: str) -> LocalEngineOptions:
    (role,) = (engine.role for engine in name_engines(known) if engine.name == name)
    last = max(engine.name for engine in name_engines(known) if engine.role == role)
    if name != last:
        raise InvalidArgument(
            "--remove",
            given=name,
            expected=f"{last}, the last of its role: they are numbered without a gap",
        )
    left = replace(known, **{role: getattr(known, role) - 1})
    if left.prefill and not left.decode:
        raise InvalidArgument(
            "--remove",
            given=f"{name}, the only decode worker",
            expected=f"p{left.prefill:02} before it: a prefill worker gives the first token of an"
            " answer and no more",
        )
    return left
