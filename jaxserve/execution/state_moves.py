"""Moves of the states of recurrent layers, which go with the slots that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_slots import chunks
from jaxserve.execution.page_copies import DevicePages
from jaxserve.steps.slots import MOVES_A_CALL, move_states, pack_moves
from jaxserve.steps.step_function import Shelf, abstract


@final
class StateMoves:
    """Moves the states in a cache between slots; without recurrent layers there are none.

    Args:
      place: sharding of the cache.
      shelf: where executables are kept.
    """

    def __init__(self, config: EngineConfig, place: jax.sharding.Sharding, shelf: Shelf):
        self._config = config
        self._move = shelf.function(
            "move_states", move_states, donate_argnums=0, out_shardings=place
        )

    def apply(self, pages: DevicePages, moves: Sequence[tuple[int, int]]) -> None:
        """Carry out moves (from slot, to slot), none of whose targets is a source too."""
        if not pages.cache.states:
            return
        for some in chunks(moves, MOVES_A_CALL):
            states = self._move(pages.cache.states, *pack_moves(self._config, some))
            pages.replace(replace(pages.cache, states=states))

    def preparations(self, pages: DevicePages) -> list[tuple[str, Callable[[], Any]]]:
        """Return (name, function); a function makes its executable, on any thread."""
        states = abstract(pages.cache.states)
        if not states:
            return []
        moves = pack_moves(self._config, ())
        return [("moves of states", partial(self._move.prepare, states, *moves))]
