"""What a pass over a model costs in time, as a function of tokens: four coefficients, a file.

The cost is that of the machine and the model at hand: `engine.fit_cost` measures it. Here is only
what it means, and how it is kept. Not for what a pass takes in memory.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest

COST_FORMAT = "cachalot prefill cost"
COST_VERSION = 1
COST_FILE_BYTES_MAX = 64 * 1024

COEFFICIENT_MAX_S = 3600.0
"""No coefficient can be larger in earnest; the bound keeps sums and squares finite."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a pass: a0 for the pass itself, and for q new tokens after c cached ones

        a1 q + a2 q c + a3 q^2

    The pairs (token, earlier token) that causal attention looks at number q c + q (q + 1) / 2, so
    for attention without selection a3 is about a2 / 2; a1 holds all that is done once a token.
    Coefficients are finite, not negative, at most an hour; else InvalidRequest is raised.
    """

    a0_s: float
    a1_s: float
    a2_s: float
    a3_s: float

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


DEFAULT_COST = PrefillCost(a0_s=0.06, a1_s=4e-4, a2_s=3e-7, a3_s=5e-7)
"""Where nothing was measured: a little more than a model of 135 million parameters took on one
core, so that steps of small models are rather too short than too long."""


def encode_cost(cost: PrefillCost, facts: Mapping[str, Any]) -> str:
    """The text of a cost file; `facts` (model, threads, residuals ...) are for people."""
    head = {"format": COST_FORMAT, "version": COST_VERSION}
    return json.dumps({**head, "coefficients": asdict(cost), **facts}, indent=2) + "\n"


def read_cost(path: Path) -> PrefillCost:
    """The cost in a file that `engine.fit_cost` wrote.

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
    if found.get("version") != COST_VERSION:
        raise _refusal(path, f"version {found.get('version')!r}")
    coefficients = found.get("coefficients")
    names = {field.name for field in fields(PrefillCost)}
    if not isinstance(coefficients, dict) or set(coefficients) != names:
        raise _refusal(path, f"other coefficients than {', '.join(sorted(names))}")
    return PrefillCost(**coefficients)


def _refusal(path: Path, given: str) -> InvalidRequest:
    return InvalidRequest(
        f"cost file {path}",
        given=given,
        expected=f"a file of engine.fit_cost, version {COST_VERSION}",
    )
