"""The documents hold together: links lead somewhere, decisions are whole, README stays short."""

import re
from pathlib import PurePosixPath

import pytest

from tests.architecture.source_tree import PACKAGES, ROOT, project_paths, project_texts

README_LINES_MAX = 120
DECISION_HEADINGS = ["Context", "Options", "Choice", "Consequences"]

DOCUMENTS = {path: text for path, text in project_texts().items() if path.endswith(".md")}
DECISIONS = {path: text for path, text in DOCUMENTS.items() if path.startswith("docs/decisions/")}


def find_broken_links(path: str, text: str) -> list[str]:
    """Return the targets of relative links in a document that are not in the project."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / PurePosixPath(path).parent / name).resolve() if name else ROOT / path
        is_text = file.is_file() and file.suffix != ".png"
        anchors = find_anchors(file.read_text(encoding="utf-8")) if is_text else set()
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    return broken


def find_anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, spelt as GitHub spells them."""
    headings = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-").lower() for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_relative_links_exist(path: str) -> None:
    assert find_broken_links(path, DOCUMENTS[path]) == []


def test_broken_links_are_found_when_planted() -> None:
    text = "[a](none.md) [b](LICENSE) [c](https://github.com) [d](LICENSE#none) `[e](none)`"
    assert find_broken_links("README.md", text) == ["none.md", "LICENSE#none"]
    assert find_anchors("# Keys, and why\n\n## 2. Parts") == {"keys-and-why", "2-parts"}


def test_readme_is_short_and_names_every_package() -> None:
    text = DOCUMENTS["README.md"]
    assert len(text.splitlines()) <= README_LINES_MAX
    present = {path.split("/", 1)[0] for path in project_paths()} & set(PACKAGES)
    assert {
        name for name in present if f"`{name}/`" not in text and f"`{name}`" not in text
    } == set()


@pytest.mark.parametrize("path", ["docs/architecture.md", "docs/glossary.md"])
def test_promised_page_exists(path: str) -> None:
    assert path in DOCUMENTS


@pytest.mark.parametrize("subject", ["cluster", "erasure", "slot", "wire"])
def test_format_has_a_page_with_a_table(subject: str) -> None:
    pages = [path for path in DOCUMENTS if path.startswith(f"docs/formats/{subject}")]
    assert len(pages) == 1
    assert re.search(r"^\|[ :|-]+\|$", DOCUMENTS[pages[0]], re.MULTILINE)


@pytest.mark.parametrize("path", DECISIONS)
def test_decision_is_whole(path: str) -> None:
    assert re.fullmatch(r"docs/decisions/\d{4}-[a-z0-9-]+\.md", path)
    headings = re.findall(r"^## (.+?) *$", DECISIONS[path], re.MULTILINE)
    assert [heading for heading in headings if heading in DECISION_HEADINGS] == DECISION_HEADINGS


def test_decision_numbers_run_without_a_gap() -> None:
    numbers = sorted(int(PurePosixPath(path).name[:4]) for path in DECISIONS)
    assert numbers == list(range(1, len(numbers) + 1))
