"""Synthetic traces: requests that are drawn without end, one a second on average.

`read_trace` takes the names in `SYNTHETIC` in place of a file. Lengths are log-normal. Their means
are those of ShareGPT under SmolLM2's tokenizer, except where a form says otherwise; the spread of
their logarithms is assumed, and so are the numbers of prefixes and of turns that the forms state.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from jaxserve.workload.trace_formats import TraceRequest

# Mean tokens of a question and of an answer, and mean turns of a conversation.
_QUESTION, _ANSWER, _TURNS = 77, 300, 5.3
# Standard deviation of the logarithm of a length, the longest length in ShareGPT's records, and
# about that of a prompt in Azure's trace.
_SPREAD, _LONGEST, _LONGEST_PROMPT = 1.0, 2048, 14_000
# Medians of Azure's conversations of 2023 (Patel et al., "Splitwise", arXiv:2311.18677, figure 3).
_AZURE_PROMPT, _AZURE_ANSWER = 1020, 129
# Gaps between requests are Gamma distributed; their coefficient of variation is 2.
_BURSTINESS = 0.25
# System prompts, and the tokens of each.
_NUM_SYSTEMS, _SYSTEM_TOKENS, _BLOCK = 4, 1024, 64
# Mean seconds between two turns of a conversation.
_REACTION_S = 60.0
# Blocks of a session are numbered from its number times this; no prompt has as many.
_MAX_BLOCKS = 1 << 20


def chat(rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Draw single questions, as Poisson arrivals."""
    time_s = 0.0
    while True:
        yield _request(rng, time_s, _QUESTION, _ANSWER)
        time_s += rng.standard_exponential()


def bursts(rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Draw long prompts and short answers, as Azure's conversations have them, in bursts."""
    over_median = math.exp(_SPREAD**2 / 2)
    time_s = 0.0
    while True:
        yield _request(rng, time_s, over_median * _AZURE_PROMPT, over_median * _AZURE_ANSWER)
        time_s += rng.standard_gamma(_BURSTINESS) / _BURSTINESS


def sessions(rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Draw conversations that begin with one of four system prompts; turns come back.

    Conversations begin as a Poisson process, and a turn follows the one before it after an
    exponentially distributed time. The number of turns is geometric.
    """
    to_come: list[tuple[float, int, TraceRequest]] = []
    number, begin_s = count(), 0.0
    for session in count(1):
        system = range(_SYSTEM_TOKENS // _BLOCK * int(rng.integers(_NUM_SYSTEMS)), _MAX_BLOCKS)
        own = range(session * _MAX_BLOCKS, (session + 1) * _MAX_BLOCKS)
        time_s, num_tokens = begin_s, _SYSTEM_TOKENS
        for _ in range(int(rng.geometric(1 / _TURNS))):
            num_tokens += _length(rng, _QUESTION)
            num_output = _length(rng, _ANSWER)
            turn = TraceRequest(
                arrival_s=time_s,
                num_prompt_tokens=num_tokens,
                num_output_tokens=num_output,
                session=f"{session}",
                blocks=(
                    *system[: _SYSTEM_TOKENS // _BLOCK],
                    *own[: -(-(num_tokens - _SYSTEM_TOKENS) // _BLOCK)],
                ),
                block_tokens=_BLOCK,
            )
            heapq.heappush(to_come, (time_s, next(number), turn))
            num_tokens += num_output
            time_s += _REACTION_S * rng.standard_exponential()
        begin_s += _TURNS * rng.standard_exponential()
        while to_come and to_come[0][0] <= begin_s:
            yield heapq.heappop(to_come)[-1]


SYNTHETIC: dict[str, Callable[[np.random.Generator], Iterator[TraceRequest]]] = {
    draw.__name__: draw for draw in (chat, sessions, bursts)
}


def _request(
    rng: np.random.Generator, time_s: float, mean_prompt: float, mean_answer: float
) -> TraceRequest:
    return TraceRequest(
        arrival_s=time_s,
        num_prompt_tokens=_length(rng, mean_prompt, _LONGEST_PROMPT),
        num_output_tokens=_length(rng, mean_answer),
    )


def _length(rng: np.random.Generator, mean: float, longest: int = _LONGEST) -> int:
    drawn = rng.lognormal(math.log(mean) - _SPREAD**2 / 2, _SPREAD)
    return min(math.ceil(drawn), longest)
