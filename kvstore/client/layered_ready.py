"""How far each section has come over all units of a fetch in layer order, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .layered_unit import LayeredUnit


class ReadyRuns:
    """For each section the leading run of blocks that have it.

    `on_ready(section, blocks)` is called whenever such a run has grown.
    """

    def __init__(
        self, units: Sequence[LayeredUnit], sections: int, on_ready: Callable[[int, int], None]
    ) -> None:
        self._units = units
        self._on_ready = on_ready
        self._unit = [0] * sections
        """The first unit that is not ready as a whole."""
        self._blocks_before = [0] * sections
        """Blocks of the units before that one."""
        self.blocks = [0] * sections

    def update(self, unit: LayeredUnit) -> None:
        """More of this unit may be ready."""
        for section, number in enumerate(self._unit):
            if number == unit.number and unit.ready_blocks[section]:
                self._advance(section)

    def _advance(self, section: int) -> None:
        units, number, blocks = self._units, self._unit[section], self._blocks_before[section]
        while number < len(units) and units[number].ready_blocks[section] == units[number].blocks:
            blocks += units[number].blocks
            number += 1
        self._unit[section], self._blocks_before[section] = number, blocks
        if number < len(units):
            blocks += units[number].ready_blocks[section]
        if blocks > self.blocks[section]:
            self.blocks[section] = blocks
            self._on_ready(section, blocks)
