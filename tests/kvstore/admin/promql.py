"""A parser for the part of PromQL that our dashboard and alert rules use.

It stands in for a Prometheus server where there is none: an expression that it takes is one that
Prometheus takes, but not the other way round. `find_mistakes` then holds an expression against the
metrics that exist: names, labels, and what may be done to which kind.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""\s*(?:
      (?P<duration>\d+(?:ms|[smhdwy])(?![\w.]))
    | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]))
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<name>[a-zA-Z_:][\w:]*)
    | (?P<sign>==|!=|>=|<=|=~|!~|[-+*/%^=<>(){}\[\],])
    )""",
    re.VERBOSE,
)
AGGREGATIONS = {"sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile"}
PARAMETRISED = {"topk", "bottomk", "quantile"}
OVER_RANGES = {"rate", "increase", "delta", "deriv", "max_over_time", "min_over_time", "changes"}
OF_COUNTERS = {"rate", "increase"}
FUNCTIONS = {"histogram_quantile": 2, "clamp_min": 2, "clamp_max": 2, "abs": 1, "absent": 1}
# Lowest first; all of one line bind alike.
LEVELS = (
    ("or",),
    ("and", "unless"),
    ("==", "!=", "<=", "<", ">=", ">"),
    ("+", "-"),
    ("*", "/", "%"),
    ("^",),
)
ALWAYS = {"node", "job", "instance"}


class PromqlError(ValueError):
    """The text is not an expression of the grammar above."""


@dataclass
class Selector:
    """A metric with matchers: `name{label="value"}[range]`."""

    name: str
    labels: list[str]
    is_range: bool = False


@dataclass
class Call:
    """A function, an aggregation or an operator over `parts`; `grouping` of an aggregation."""

    name: str
    parts: "list[Node]"
    grouping: list[str] = field(default_factory=list)


@dataclass
class Literal:
    """A number or a string."""

    text: str


Node = Selector | Call | Literal


def parse(text: str) -> Node:
    """Parse an expression; PromqlError says where it breaks off."""
    parser = _Parser(text)
    found = parser.binary(0)
    if parser.kind != "end":
        raise PromqlError(f"{parser.text!r} is left over in {text!r}")
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._source = text
        self._place = 0
        self.kind, self.text = "", ""
        self._next()

    def _next(self) -> str:
        """Step over the token in hand and return it."""
        before = self.text
        rest = self._source[self._place :]
        if not rest.strip():
            self.kind, self.text = "end", ""
            return before
        match = TOKEN.match(rest)
        if match is None:
            raise PromqlError(f"cannot read {rest[:20]!r} in {self._source!r}")
        self._place += match.end()
        assert match.lastgroup is not None
        self.kind, self.text = match.lastgroup, match[match.lastgroup]
        return before

    def _take(self, text: str) -> None:
        if self.text != text or self.kind == "string":
            raise PromqlError(f"{text!r} expected, not {self.text!r}, in {self._source!r}")
        self._next()

    def _is(self, *texts: str) -> bool:
        return self.kind in ("sign", "name") and self.text in texts

    def _take_kind(self, kind: str) -> str:
        if self.kind != kind:
            raise PromqlError(f"a {kind} expected, not {self.text!r}, in {self._source!r}")
        return self._next()

    def binary(self, level: int) -> Node:
        """Parse operators of this level and all that bind closer."""
        if level == len(LEVELS):
            return self._unary()
        left = self.binary(level + 1)
        while self._is(*LEVELS[level]):
            operator = self._next()
            if self._is("bool"):
                self._next()
            self._matching()
            left = Call(operator, [left, self.binary(level + 1)])
        return left

    def _matching(self) -> None:
        if self._is("on", "ignoring"):
            self._next()
            self._names()
            if self._is("group_left", "group_right"):
                self._next()
                if self._is("("):
                    self._names()

    def _unary(self) -> Node:
        if self._is("-", "+"):
            return Call(self._next(), [self._unary()])
        return self._primary()

    def _primary(self) -> Node:
        if self.kind in ("number", "string"):
            return Literal(self._next())
        if self._is("("):
            self._next()
            found = self.binary(0)
            self._take(")")
            return found
        name = self._take_kind("name")
        if name in AGGREGATIONS:
            return self._aggregation(name)
        if self._is("("):
            return self._call(name)
        return self._selector(name)

    def _aggregation(self, name: str) -> Node:
        grouping = self._grouping()
        parts = self._arguments()
        grouping = grouping or self._grouping()
        if len(parts) != (2 if name in PARAMETRISED else 1):
            raise PromqlError(f"{name} of {len(parts)} in {self._source!r}")
        return Call(name, parts, grouping)

    def _grouping(self) -> list[str]:
        if not self._is("by"):
            return []
        self._next()
        return self._names()

    def _call(self, name: str) -> Node:
        parts = self._arguments()
        if name not in OVER_RANGES and name not in FUNCTIONS:
            raise PromqlError(f"unknown function {name} in {self._source!r}")
        if len(parts) != FUNCTIONS.get(name, 1):
            raise PromqlError(f"{name} of {len(parts)} in {self._source!r}")
        return Call(name, parts)

    def _arguments(self) -> list[Node]:
        self._take("(")
        parts = [self.binary(0)]
        while self._is(","):
            self._next()
            parts.append(self.binary(0))
        self._take(")")
        return parts

    def _names(self) -> list[str]:
        self._take("(")
        names = [] if self._is(")") else [self._take_kind("name")]
        while self._is(","):
            self._next()
            names.append(self._take_kind("name"))
        self._take(")")
        return names

    def _selector(self, name: str) -> Node:
        found = Selector(name, [])
        if self._is("{"):
            self._next()
            while not self._is("}"):
                found.labels.append(self._take_kind("name"))
                if not self._is("=", "!=", "=~", "!~"):
                    raise PromqlError(f"{self.text!r} between a label and its value")
                self._next()
                self._take_kind("string")
                if not self._is("}"):
                    self._take(",")
            self._next()
        if self._is("["):
            self._next()
            self._take_kind("duration")
            self._take("]")
            found.is_range = True
        if self._is("offset"):
            self._next()
            self._take_kind("duration")
        return found


@dataclass(frozen=True)
class KnownMetric:
    """What the check needs of a metric: its kind and its labels, without those in ALWAYS."""

    kind: str
    labels: frozenset[str]


def walk(node: Node) -> Iterator[tuple[Node, Node | None]]:
    """Each node below with its parent."""
    stack: list[tuple[Node, Node | None]] = [(node, None)]
    while stack:
        here, parent = stack.pop()
        yield here, parent
        if isinstance(here, Call):
            stack.extend((part, here) for part in here.parts)


def find_mistakes(node: Node, known: Mapping[str, KnownMetric]) -> list[str]:
    """What is wrong with an expression, given the time series that exist by name."""
    found = []
    for here, parent in walk(node):
        if isinstance(here, Selector):
            found += _check_selector(here, parent, known)
        elif isinstance(here, Call) and here.grouping:
            metrics = [known.get(one.name) for one, _ in walk(here) if isinstance(one, Selector)]
            labels = set().union(*(metric.labels for metric in metrics if metric)) | ALWAYS
            found += [
                f"no label {one} below {here.name}" for one in here.grouping if one not in labels
            ]
        if isinstance(here, Call) and here.name == "histogram_quantile":
            inner = here.parts[1]
            if not (isinstance(inner, Call) and "le" in inner.grouping):
                found.append("histogram_quantile without le")
    return found


def _check_selector(
    selector: Selector, parent: Node | None, known: Mapping[str, KnownMetric]
) -> list[str]:
    metric = known.get(selector.name)
    if metric is None:
        return [f"no metric {selector.name}"]
    function = parent.name if isinstance(parent, Call) else ""
    found = [
        f"no label {label} of {selector.name}"
        for label in selector.labels
        if label not in metric.labels | ALWAYS
    ]
    if selector.is_range != (function in OVER_RANGES):
        found.append(
            f"{selector.name}: a range belongs into a function over ranges, and only there"
        )
    if (metric.kind == "counter") != (function in OF_COUNTERS):
        found.append(f"{selector.name} is a {metric.kind}, under {function or 'nothing'}")
    return found
