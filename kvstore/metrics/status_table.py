"""Tables of metrics whose figures are those of a process's status document: of agents, of engines.
Pure. A figure that is missing there gives no sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .readings import (
    MetricHead,
    Reading,
    distribution_of,
    read_mapping,
    sample_of,
    samples_of,
)

Status: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[Status], Iterable[Reading]]


@dataclass(frozen=True, slots=True)
class StatusMetric(MetricHead):
    """One metric, and how it is read from the status document."""

    read: Reader


class MetricMaker:
    """Makes metrics called `cachalot_WHO_...`."""

    def __init__(self, who: str) -> None:
        self._prefix = f"cachalot_{who}"

    def gauge(self, name: str, unit: str, text: str, read: Reader, *labels: str) -> StatusMetric:
        """A figure of now."""
        return StatusMetric(f"{self._prefix}_{name}", "gauge", labels, unit, text, read)

    def counter(self, name: str, unit: str, text: str, read: Reader, *labels: str) -> StatusMetric:
        """A figure that only grows."""
        return StatusMetric(f"{self._prefix}_{name}_total", "counter", labels, unit, text, read)

    def histogram(self, name: str, text: str, path: str) -> StatusMetric:
        """Times, of which the document has a histogram at `path`."""
        name = f"{self._prefix}_{name}_seconds"
        return StatusMetric(name, "histogram", (), "seconds", text, _histogram_at(path))


def find(status: Status, path: str) -> object:
    """The value at "a.b.c" of nested objects; None if there is none."""
    found: object = status
    for name in path.split("."):
        found = read_mapping(found).get(name)
    return found


def at(path: str) -> Reader:
    """The figure there."""
    return lambda status: sample_of(find(status, path))


def by_label(path: str) -> Reader:
    """Figures by the value of a label."""
    return lambda status: samples_of((), read_mapping(find(status, path)))


def pick(path: str, *names: str) -> Reader:
    """Of the figures at `path` those called `names`, which are the values of a label."""

    def read(status: Status) -> Iterator[Reading]:
        found = read_mapping(find(status, path))
        for name in names:
            yield from sample_of(found.get(name), name)

    return read


def _histogram_at(path: str) -> Reader:
    def read(status: Status) -> Iterator[Reading]:
        found = distribution_of((), find(status, path))
        if found is not None:
            yield found

    return read


def read_all(
    metrics: Sequence[StatusMetric], status: Status
) -> Iterator[tuple[MetricHead, Iterable[Reading]]]:
    """Each metric with its samples."""
    return ((metric, metric.read(status)) for metric in metrics)
