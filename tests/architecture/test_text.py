"""What no file of the project may say: work left open, one machine's paths, outside addresses."""

import re

import pytest

from tests.architecture.source_tree import project_texts

# Each forbidden word is put together here, so that this file is not the one that is found.
OPEN_WORK = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")

MACHINE_PATH = re.compile(
    r"(?<![\w.~$}-])/(?:" + "|".join(("home", "opt", "root", "srv", "Users", "wo" + "rk")) + r")/\w"
)

REGISTRY_HOST = re.compile(
    r"\b(?:"
    + "|".join(
        re.escape(name + "." + ending)
        for name, ending in (
            ("py" + "pi", "org"),
            ("python" + "hosted", "org"),
            ("npm" + "js", "org"),
            ("npm" + "js", "com"),
            ("crates", "io"),
            ("deb.de" + "bian", "org"),
            ("py" + "torch", "org"),
            ("hugging" + "face", "co"),
            ("golang", "org"),
            ("docker", "io"),
        )
    )
    + r")\b"
)

# This machine, places where code and papers are published, names set aside for examples, and the
# name of a file format that only looks like an address.
ADDRESS = re.compile(
    r"https?://(?!127\.0\.0\.1|localhost|\[::1\]|(?:www\.)?github\.com|arxiv\.org"
    r"|www\.w3\.org/2000/svg\b|[\w.-]*\bexample\.|[{$])[\w.-]+",
    re.IGNORECASE,
)

# The licence is quoted word for word.
QUOTED = {"LICENSE"}


def find_lines(pattern: re.Pattern[str]) -> list[str]:
    """Return `path:line: text` of every line of the project that the pattern matches."""
    return [
        f"{path}:{number}: {line.strip()[:90]}"
        for path, text in project_texts().items()
        if path not in QUOTED
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_left_open() -> None:
    assert find_lines(OPEN_WORK) == []


def test_no_path_belongs_to_one_machine() -> None:
    assert find_lines(MACHINE_PATH) == []


def test_no_package_registry_is_named() -> None:
    assert find_lines(REGISTRY_HOST) == []


def test_no_address_leads_outside() -> None:
    assert find_lines(ADDRESS) == []


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        (OPEN_WORK, "# TO" + "DO: later", True),
        (OPEN_WORK, "mktemp name." + "X" * 6, False),
        (MACHINE_PATH, "open('/ho" + "me/someone/x')", True),
        (MACHINE_PATH, "see docs/wo" + "rk/flow.md", False),
        (MACHINE_PATH, "$HOME/opt/x and ~/wo" + "rk/x", False),
        (REGISTRY_HOST, "--index-url files.python" + "hosted.org", True),
        (ADDRESS, "http" + "://somewhere.org/x", True),
        (ADDRESS, "http" + "://127.0.0.1:80/x and https" + "://github.com/a/b", False),
    ],
)
def test_patterns_find_what_they_are_for(
    pattern: re.Pattern[str], text: str, is_found: bool
) -> None:
    assert bool(pattern.search(text)) == is_found
