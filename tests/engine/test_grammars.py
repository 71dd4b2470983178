"""Grammars that would harm the process, or each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    GrammarFailedError,
    GrammarsBusyError,
    GrammarTooComplexError,
    InvalidGrammarError,
    InvalidSamplingParamsError,
    RuntimeClosedError,
)
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_PARTS, Constraint, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.grammar_compilation import (
    MAX_WAITING,
    NUM_THREADS,
    CompileJob,
    CompileThreads,
    GrammarTrials,
)
from jaxserve.engine.grammars import MAX_KEPT, Grammars
from jaxserve.engine.matcher import Matcher
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.plan import TokenMasks
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import letter_tokenizer
from tests.common.schemas import SYMBOLS

# Compiles three grammars in which llguidance recurses as deeply as the bounds allow, and one more.
_DEEP = """
import json
from jaxserve.core.sampling_params import MAX_PARTS
from jaxserve.core.errors import InvalidGrammarError, InvalidSamplingParamsError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.grammars import Grammars
from jaxserve.testing import letter_tokenizer

def rules(n):
    chain = "".join(f"r{i}:r{i+1}\\n" for i in range(n))
    return SamplingParams(grammar=f"start: r0\\n{chain}r{n}: \\"a\\"")

def conditions(n):
    return SamplingParams(
        grammar="start: r::0\\nr::_: \\"a\\" %if " + "not(" * n + "is_ones([0:8])" + ")" * n
    )

def definitions(n):
    defs = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i+1}"}},
        "required": ["a"]} for i in range(n)
    }
    defs[f"d{n}"] = {"type": "string"}
    return SamplingParams(json_schema={"$ref": "#/$defs/d0", "$defs": defs})

tokenizer = letter_tokenizer()
grammars = Grammars(tokenizer, (), tokenizer.vocab_size)
for make, most in ((rules, 9_990), (conditions, 9_990), (definitions, 1_300)):
    for n in (most, 30_000):
        try:
            grammars.compiled(make(n).constraint)
            print(make.__name__, n, "compiled")
        except (InvalidGrammarError, InvalidSamplingParamsError) as error:
            print(make.__name__, n, type(error).__name__)
grammars.close()
"""

_SLOW = """
from jaxserve.core.sampling_params import Constraint
from jaxserve.engine.grammars import Grammars
from jaxserve.testing import letter_tokenizer

tokenizer = letter_tokenizer()
grammars = Grammars(tokenizer, (), tokenizer.vocab_size, max_cpu_s=0.3, max_wait_s=600)
try:
    grammars.compiled(Constraint("grammar", 'SLOW'))
except Exception as error:
    print(type(error).__name__)
grammars.close()
"""


class _Stranger:
    """An `LLMatcher` that llguidance refuses to compute masks of, with a TypeError."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    tokenizer = letter_tokenizer()
    made = Grammars(tokenizer, (), tokenizer.vocab_size)
    yield made
    made.close()


def _regex(text: str) -> Constraint:
    return Constraint("regex", text)


@pytest.mark.release
def test_deep_grammars_do_not_end_the_process():
    """Chains of rules, conditions and definitions compile within the bounds, or are refused."""
    done = subprocess.run(
        [sys.executable, "-c", _DEEP], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.split("\n")[:-1] == [
        "rules 9990 compiled",
        "rules 30000 InvalidSamplingParamsError",
        "conditions 9990 InvalidGrammarError",
        "conditions 30000 InvalidSamplingParamsError",
        "definitions 1300 compiled",
        "definitions 30000 InvalidSamplingParamsError",
    ]


def test_parts_are_counted():
    """Brackets count in schemas and grammars; not in regular expressions, which have a bound."""
    with pytest.raises(InvalidSamplingParamsError, match="counted by lines"):
        SamplingParams(grammar="start: " + '("a")' * (MAX_PARTS + 1))
    with pytest.raises(InvalidSamplingParamsError, match="counted by lines"):
        SamplingParams(json_schema={"enum": [[]] * MAX_PARTS})
    SamplingParams(regex="(a)" * (MAX_PARTS + 1))
    SamplingParams(json_schema={"enum": list(range(MAX_PARTS))})


def test_rules_with_parameters_are_refused(grammars: Grammars):
    """llguidance would expand this one without end."""
    with pytest.raises(InvalidGrammarError, match="with a parameter"):
        grammars.compiled(Constraint("grammar", "start: r::1\nr :: _: r::incr(_)"))


def test_a_request_keeps_its_grammar(grammars: Grammars):
    """Others that come after it do not make an engine compile it again."""
    first = grammars.compiled(_regex("[ab]c"))
    assert grammars.compiled(_regex("[ab]c")) is first
    for i in range(MAX_KEPT):
        grammars.compiled(_regex(f"a{i}"))
    assert grammars.compiled(_regex("[ab]c")) is not first
    params = SamplingParams(regex="[ab]c")
    request = Request(id="a", prompt=(1,), params=params, arrival_s=0.0, grammar=first)
    grammars.close()
    matcher = grammars.matcher(request)
    assert not matcher.is_complete and matcher.error is None


def test_a_failure_of_llguidance_ends_the_answers_concerned(grammars: Grammars):
    """With proposals and without, its neighbours have the masks that they have alone."""
    tokenizer = letter_tokenizer()
    constraint, text = _regex("[a-d]{50}"), tokenizer.encode("abc")

    def made(is_stranger: bool, num_proposed: int) -> Matcher:
        inner = grammars.compiled(constraint).template.deep_copy()
        matcher = Matcher(_Stranger(inner) if is_stranger else inner)
        assert len(matcher.propose(text, num_proposed, forces=False)) == num_proposed
        return matcher

    kinds = [(False, 2), (True, 0), (False, 0), (True, 3), (False, 1), (False, 0)]
    matchers = [made(*kind) for kind in kinds]
    rows = tuple(range(sum(1 + num for _, num in kinds)))
    words = grammars.masks(rows, matchers).words()
    place = 0
    for (is_stranger, num), matcher in zip(kinds, matchers, strict=True):
        own = words[place : place + 1 + num]
        place += 1 + num
        if is_stranger:
            assert isinstance(matcher.error, GrammarFailedError)
            assert isinstance(matcher.error.__cause__, TypeError)
            assert (own == 2**32 - 1).all()
        else:
            alone = grammars.masks(tuple(range(1 + num)), [made(False, num)]).words()
            assert matcher.error is None
            np.testing.assert_array_equal(own, alone)


def test_an_engine_goes_on_beside_a_failure_of_llguidance(grammars: Grammars):
    """One of two answers cannot get masks, and ends; the other one ends as it would alone."""

    class Source:
        def matcher(self, request: Request) -> Matcher:
            matcher = grammars.matcher(request)
            return Matcher(_Stranger(matcher.inner)) if request.id == "bad" else matcher

        def masks(self, rows: tuple[int, ...], matchers: Sequence[Matcher]) -> TokenMasks:
            return grammars.masks(rows, matchers)

    config = EngineConfig(num_pages=50, page_size=4, max_slots=4, max_context=60)
    clock = VirtualClock()
    size = letter_tokenizer().vocab_size
    executor = SimulatedExecutor(config, clock, vocab_size=size, answer_length=lambda *_: 99)
    engine = Engine(executor, PRESETS["vllm_like"], clock, grammars=Source())
    every = "|".join(re.escape(letter_tokenizer().decode([i])) for i in range(1, size))
    params = SamplingParams(max_tokens=9, regex=f"({every})*")
    grammar = grammars.compiled(_regex(f"({every})*"))
    bad, good = (
        engine.add(Request(id=id, prompt=(1, 2), params=params, arrival_s=0.0, grammar=grammar))[0]
        for id in ("bad", "good")
    )
    while engine.has_work:
        engine.step()
    assert isinstance(bad.error, GrammarFailedError) and not bad.output
    assert good.error is None and len(good.output) == 9


def test_an_answer_without_states_does_not_end_later_ones(grammars: Grammars):
    """Answers share the states of a lexer; when none is left, the grammar is compiled anew."""
    constraint = _regex("(a|b)*a(a|b){15}c?")
    first = grammars.compiled(constraint)
    params = SamplingParams(regex=constraint.text)
    request = Request(id="a", prompt=(1,), params=params, arrival_s=0.0, grammar=first)
    ab = [letter_tokenizer().encode(letter)[-1] for letter in "ab"]
    matcher, output, number = grammars.matcher(request), list[int](), 1
    while matcher.error is None:
        number = number * 69069 % 2**32 + 1
        output.append(ab[number >> 20 & 1])
        matcher.follow(output)
        matcher.inner.compute_bitmask()
        assert len(output) < 100_000
    assert first.is_exhausted
    again = grammars.compiled(constraint)
    assert again is not first and not again.is_exhausted


def _all_that_run(threads: CompileThreads, may_end: threading.Event) -> list[CompileJob]:
    begun = threading.Barrier(NUM_THREADS + 1)

    def wait() -> bool:
        begun.wait(30)
        return may_end.wait(30)

    jobs = [threads.submit(wait) for _ in range(NUM_THREADS)]
    begun.wait(30)
    return jobs


def test_jobs_are_bounded_in_number_and_time():
    """One that waits for too long, or one too many, is busy; what runs goes on."""
    threads, may_end = CompileThreads(), threading.Event()
    slow = _all_that_run(threads, may_end)
    with pytest.raises(TimeoutError):
        slow[0].result(0.0)
    waiting: list[CompileJob] = []
    deadline_s = time.monotonic() + 10
    with pytest.raises(GrammarsBusyError):
        while time.monotonic() < deadline_s:
            waiting.append(threads.submit(lambda: 1))
    assert len(waiting) >= MAX_WAITING
    with pytest.raises(GrammarsBusyError):
        waiting[0].result(0.05)
    assert waiting[0].is_dropped
    may_end.set()
    assert slow[0].result(5) and waiting[1].result(5) == 1
    threads.close()
    with pytest.raises(RuntimeClosedError):
        threads.submit(lambda: 1)


def test_waiting_jobs_end_when_the_threads_are_closed():
    """What runs ends; what waits gets a typed error."""
    threads, may_end = CompileThreads(), threading.Event()
    slow = _all_that_run(threads, may_end)
    last = threads.submit(lambda: 1)
    threads.close()
    with pytest.raises(RuntimeClosedError):
        last.result(5)
    may_end.set()
    assert all(job.result(5) for job in slow)


def test_a_closed_runtime_compiles_nothing(grammars: Grammars):
    """The error is that of every call after `close`."""
    grammars.close()
    with pytest.raises(RuntimeClosedError):
        grammars.compiled(_regex("a"))


def test_a_slow_grammar_is_too_complex():
    """A compilation that computes for longer than it may is refused, also the second time."""
    tokenizer = letter_tokenizer()
    sizes = tokenizer, (), tokenizer.vocab_size
    grammars = Grammars(*sizes, max_cpu_s=0.3, max_wait_s=600)
    slow = Constraint("grammar", "start: " + '"a"? ' * 20_000)
    for _ in range(2):
        with pytest.raises(GrammarTooComplexError, match=r"more than 0.3 s of processor time"):
            grammars.compiled(slow)
    grammars.close()


def test_a_grammar_on_a_busy_machine_is_not_too_complex():
    """Who has waited long enough is told to come again, and finds it compiled."""
    tokenizer = letter_tokenizer()
    grammars = Grammars(tokenizer, (), tokenizer.vocab_size, max_wait_s=0.01)
    with pytest.raises(GrammarsBusyError, match=r"not compiled within 0.01 s"):
        grammars.compiled(_regex("[ab]c"))  # its process has not even begun
    compiled, until_s = None, time.monotonic() + 600
    while compiled is None and time.monotonic() < until_s:
        with suppress(GrammarsBusyError):
            compiled = grammars.compiled(_regex("[ab]c"))
    assert compiled is not None and grammars.compiled(_regex("[ab]c")) is compiled
    grammars.close()


def _conflicting(count: int) -> Constraint:
    """Return a schema that llguidance takes minutes to compile from a count of about 100 on."""
    patterns = [{"type": "string", "pattern": f"x.{{{i + 5}}}y"} for i in range(count)]
    return Constraint("json_schema", json.dumps({"allOf": patterns}))


def test_slow_grammars_are_stopped():
    """As many as there are threads leave these free for others when their time is over."""
    tokenizer = letter_tokenizer()
    sizes = tokenizer, (), tokenizer.vocab_size
    grammars = Grammars(*sizes, max_cpu_s=0.5, max_wait_s=600)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        slow = [pool.submit(grammars.compiled, _conflicting(100 + i)) for i in range(NUM_THREADS)]
        assert all(isinstance(each.exception(), GrammarTooComplexError) for each in slow)
    grammars.compiled(_regex("[ab]c"))
    grammars.close()


def test_trials_are_bounded_in_memory():
    """A grammar that takes more than is allowed ends its process alone; a broken one passes."""
    limits = {"max_grammar_size": 2**40}
    trials = GrammarTrials((100, {0: "<end>"}, 0), limits, 60.0, max_bytes=200 << 20)
    with pytest.raises(GrammarTooComplexError, match="200 MiB"):
        trials.check(SYMBOLS)
    trials.check('start: "a" <end>')
    trials.check("start: nothing")
    trials.close()
    with pytest.raises(RuntimeClosedError):
        trials.check('start: "a"')


@pytest.mark.release
def test_a_process_that_has_rested_is_replaced():
    """A process ends when no grammar comes for a while, and the next one gets another."""
    trials = GrammarTrials((100, {}, 100), {}, 10.0, idle_s=0.05)
    for pause_s in (0.0, 0.3, 0.0):
        time.sleep(pause_s)
        trials.check('start: "a"')
    trials.close()


@pytest.mark.release
def test_a_process_may_end_while_a_grammar_is_compiled():
    """Its end waits for the compilation that was given up, which would crash it."""
    program = _SLOW.replace("SLOW", "start: " + '"a"? ' * 20_000)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "GrammarTooComplexError\n")
