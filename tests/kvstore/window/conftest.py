"""What tests of window memory share."""

import pytest

from kvstore.window import announcer
from tests.patience import OPERATION_S


@pytest.fixture(autouse=True)
def looks_up_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entrypoint has more than a tenth of a second to answer."""
    monkeypatch.setattr(announcer, "LOOKUP_S_MAX", OPERATION_S)
