"""Answers with a grammar share what a step may propose."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.plan import TokenMasks
from jaxserve.scheduling.presets import PRESETS


class _Matcher:
    """Allows every token, proposes none, and keeps how many it might have proposed."""

    mask_s = 0.0
    is_complete = False
    error = None

    def __init__(self, shares: list[int]):
        self._shares = shares

    def follow(self, output: Sequence[int]) -> None:
        pass

    def forced(self) -> list[int]:
        return []

    def propose(self, tokens: Sequence[int], most: int, *, forces: bool) -> tuple[int, ...]:
        if most:
            self._shares.append(most)
        return ()


class _Source:
    def __init__(self):
        self.shares: list[int] = []

    def matcher(self, request: Request) -> _Matcher:
        return _Matcher(self.shares)

    def masks(self, rows: tuple[int, ...], matchers: Sequence[_Matcher]) -> TokenMasks:
        words: Future[np.ndarray] = Future()
        words.set_result(np.full((len(rows), 1), 2**32 - 1, np.uint32))
        return TokenMasks(rows, words)


def test_those_that_run_share_the_proposals_of_a_step():
    """Twelve requests, of which the page pool holds three; the nine that wait get no share."""
    config = EngineConfig(num_pages=19, page_size=4, max_slots=16, max_context=60, num_proposed=8)
    clock, source = VirtualClock(), _Source()
    executor = SimulatedExecutor(config, clock, answer_length=lambda *_: 99)
    engine = Engine(executor, PRESETS["orca"], clock, grammars=source)
    params = SamplingParams(max_tokens=8, regex="a")
    prompt = tuple(range(1, 17))
    for i in range(12):
        engine.add(Request(id=f"{i}", prompt=prompt, params=params, arrival_s=0.0))
    seen = []
    while engine.has_work:
        source.shares.clear()
        engine.step()
        if source.shares:
            assert len(engine.scheduler.running) == len(source.shares) == 3
            seen.append(tuple(source.shares))
    # Five proposals and three rows fill a tile of tokens; an answer's last token needs none.
    assert config.num_proposed_beside(3) == 5
    assert set(seen) == {(2, 2, 1), (1, 1, 1)} and seen.count((2, 2, 1)) == 4 * 5
