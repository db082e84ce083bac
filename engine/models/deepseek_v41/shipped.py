"""Configs that come with the package: `v41-nano` for tests, `v41-flash` as it was released."""

from importlib import resources

from ...errors import InvalidRequest
from .config import DeepseekV41Config
from .config_file import parse_config
from .json_file import parse_json

SHIPPED_CONFIGS = ("v41-nano", "v41-flash")


def shipped_config(name: str) -> DeepseekV41Config:
    """One of `SHIPPED_CONFIGS`; raises InvalidRequest for another name."""
    if name not in SHIPPED_CONFIGS:
        raise InvalidRequest("shipped config", given=name, expected=", ".join(SHIPPED_CONFIGS))
    file = resources.files(__package__) / "configs" / f"{name}.json"
    config, problems = parse_config(parse_json(file.read_bytes()))
    assert config is not None, problems
    return config
