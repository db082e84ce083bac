"""What a pass over a model costs in time, as a function of tokens: five coefficients, a file.

The cost is that of the machine and the model at hand: `engine.fit_cost` measures it. Here is only
what it means, and how it is kept. Not for what a pass takes in memory.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvstore.errors import shown

from ..errors import InvalidRequest

COST_FORMAT = "cachalot prefill cost"
COST_VERSION = 2
COST_FILE_BYTES_MAX = 64 * 1024

COEFFICIENT_MAX_S = 3600.0
"""No coefficient can be larger in earnest; the bound keeps sums and squares finite."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a pass: a0 for the pass itself, and for q new tokens after c cached ones

        a1 q + a2 q c + a3 q^2

    The pairs (token, earlier token) that causal attention looks at number q c + q (q + 1) / 2, so
    for attention without selection a3 is about a2 / 2; a1 holds all that is done once a token.
    Each further sequence in the pass costs a4 beside its own tokens: about a0 where sequences are
    run one by one, little where they share one forward.
    Coefficients are finite, not negative, at most an hour; else InvalidRequest is raised.
    """

    a0_s: float
    a1_s: float
    a2_s: float
    a3_s: float
    a4_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (type(value) in (int, float) and 0 <= value <= COEFFICIENT_MAX_S):
                raise InvalidRequest(
                    f"prefill cost {field.name}",
                    given=repr(value),
                    expected=f"seconds, 0 to {COEFFICIENT_MAX_S:g}",
                )

    def cost_s(self, tokens: int, cached_tokens: int) -> float:
        """A pass with nothing but `tokens` new tokens after `cached_tokens`."""
        return self.a0_s + self.added_s(tokens, cached_tokens)

    def added_s(self, tokens: int, cached_tokens: int) -> float:
        """What they add to a pass that runs anyway. Never falls as `tokens` grows, not even by
        rounding: each operation is monotone."""
        return tokens * (self.a1_s + self.a2_s * cached_tokens + self.a3_s * tokens)


_COEFFICIENTS = {
    1: {"a0_s", "a1_s", "a2_s", "a3_s"},
    2: {field.name for field in fields(PrefillCost)},
}
"""Of each version of the file."""

DEFAULT_COST = PrefillCost(a0_s=0.08, a1_s=4e-3, a2_s=2e-6, a3_s=1e-6, a4_s=0.08)
"""Where nothing was measured: a little more than a model of 135 million parameters took on one core
that computes in float32, sequences one by one, and three times what it took on a faster one. So
steps of small models are rather too short than too long."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A cost, and what it was measured on; None where its file does not say."""

    cost: PrefillCost
    source: Path
    model: str | None = None
    device: str | None = None
    threads: int | None = None


def encode_cost(cost: PrefillCost, facts: Mapping[str, Any]) -> str:
    """The text of a cost file; `facts` (model, threads, residuals ...) are for people."""
    head = {"format": COST_FORMAT, "version": COST_VERSION}
    return json.dumps({**head, "coefficients": asdict(cost), **facts}, indent=2) + "\n"


def read_cost(path: Path) -> MeasuredCost:
    """The cost in a file that `engine.fit_cost` wrote, now or before there was a4.

    Raises InvalidRequest for one that cannot be read, or has anything else in it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(COST_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error
    if len(data) > COST_FILE_BYTES_MAX:
        raise _refusal(path, f"more than {COST_FILE_BYTES_MAX} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "no JSON") from error
    if not isinstance(found, dict) or found.get("format") != COST_FORMAT:
        raise _refusal(path, "another format")
    version = found.get("version")
    if type(version) is not int or version not in _COEFFICIENTS:
        raise _refusal(path, f"version {version!r}")
    coefficients, names = found.get("coefficients"), _COEFFICIENTS[version]
    if not isinstance(coefficients, dict) or set(coefficients) != names:
        raise _refusal(path, f"other coefficients than {', '.join(sorted(names))}")
    model, device, threads = (found.get(name) for name in ("model", "device", "threads"))
    return MeasuredCost(
        PrefillCost(**coefficients),
        path,
        model=model if isinstance(model, str) else None,
        device=device if isinstance(device, str) else None,
        threads=threads if type(threads) is int else None,
    )


def describe_mismatch(
    measured: MeasuredCost, *, model: Path, device: str, threads: int
) -> str | None:
    """In one line, how a worker differs from what its cost was measured on; None if it does not.

    Numbers of a card and, with one, of threads make no other cost.
    """
    differences = []
    name = model.absolute().name
    if measured.model not in (None, name):
        differences.append(f"model {shown(measured.model)}, not {name}")
    here = device.partition(":")[0]
    if measured.device is not None and measured.device.partition(":")[0] != here:
        differences.append(f"device {shown(measured.device)}, not {device}")
    if measured.threads not in (None, threads) and here == "cpu":
        differences.append(f"threads {measured.threads}, not {threads}")
    if not differences:
        return None
    return (
        f"cost file {measured.source} was measured with {'; '.join(differences)}:"
        " chunks of prompts may be too long or too short"
    )


def _refusal(path: Path, given: str) -> InvalidRequest:
    return InvalidRequest(
        f"cost file {path}",
        given=given,
        expected=f"a file of engine.fit_cost, version {' or '.join(map(str, _COEFFICIENTS))}",
    )
