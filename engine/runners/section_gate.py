"""Waits for the sections of a prefix as a pass comes to them: each once, in order."""

from ..model_runner import WaitForSection


class SectionGate:
    """For one pass, which may come to a section many times."""

    def __init__(self, wait_for_section: WaitForSection) -> None:
        self._wait_for_section = wait_for_section
        self._passed = 0

    def pass_section(self, section: int) -> None:
        """Wait for `section` unless that was done; the ones before it have been waited for."""
        if section < self._passed:
            return
        assert section == self._passed, f"section {section} before section {self._passed}"
        self._wait_for_section(section)
        self._passed += 1
