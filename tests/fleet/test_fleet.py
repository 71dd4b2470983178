"""Replicas on a real Ray: the answers of one runtime, no loss by deaths, and no leftovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import httpx2
import pytest
from typer.testing import CliRunner

from jaxserve import Fleet, Runtime, SamplingParams
from jaxserve.cli import app
from jaxserve.core.errors import (
    EmptyPromptError,
    InvalidConfigError,
    InvalidRequestError,
    MissingExtraError,
    RuntimeClosedError,
    TokenOutOfRangeError,
    TurnTimeoutError,
    UnknownModelError,
)
from jaxserve.engine.answers import Piece
from jaxserve.fleet.fleet import check_resources
from jaxserve.fleet.replica import ReplicaState
from jaxserve.runtime import Service
from jaxserve.server import ServerOptions, running
from jaxserve.testing.tiny import VOCAB_SIZE, random_prompts
from tests.common.processes import HEED_INTERRUPTS
from tests.common.waiting import until
from tests.fleet.tiny_model import CONFIG, OPTIONS

PROMPTS = random_prompts(12, longest=40)
LONG = [SamplingParams(max_tokens=1800, temperature=0.9 * (i % 2)) for i in range(len(PROMPTS))]
SHORT = SamplingParams(max_tokens=12)
WAIT_S = 240


@final
@dataclass(frozen=True)
class Wanted:
    """The answers of one runtime to the first four requests, with seeds, and to the long ones."""

    drawn: list[tuple[int, ...]]
    long: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def wanted(model) -> Wanted:
    with Runtime.from_pretrained(model, **OPTIONS) as rt:
        drawn = rt.generate(PROMPTS[:4], SamplingParams(max_tokens=12, temperature=1.0))
        long = rt.generate(PROMPTS, _seeded(LONG))
    return Wanted([c.token_ids for c in drawn], [c.token_ids for c in long])


@pytest.fixture(scope="module")
def fleet(ray, model, wanted, tmp_path_factory) -> Iterator[Fleet]:
    """A fleet that starts after `wanted`, which compiled all executables."""
    journal = tmp_path_factory.mktemp("journal") / "kept.sqlite"
    with Fleet(model, replicas=2, conversations=journal, **OPTIONS) as fleet:
        yield fleet
        pids = _pids(fleet)
    until(lambda: not any(map(_is_running, pids)), WAIT_S)
    with pytest.raises(RuntimeClosedError):
        fleet.submit([1])


def _seeded(params: list[SamplingParams]) -> list[SamplingParams]:
    return [replace(one, seed=i) for i, one in enumerate(params)]


def _pids(fleet: Fleet) -> list[int]:
    return [state.started.pid for state in fleet.replicas if state.started is not None]


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.release
def test_a_killed_replica_loses_no_request(fleet, wanted):
    """After kill -9 in the middle of answers, all answers come, equal to one runtime's."""
    pending = [fleet.submit(p, s) for p, s in zip(PROMPTS, _seeded(LONG), strict=True)]
    until(lambda: all(state.num_unfinished for state in fleet.replicas), WAIT_S)
    time.sleep(0.1)
    victim = fleet.replicas[0]
    assert victim.started is not None and victim.num_unfinished > 0
    os.kill(victim.started.pid, signal.SIGKILL)
    done = [one.result(WAIT_S) for one in pending]
    assert [c.error for c in done] == [None] * len(done)
    assert [c.token_ids for c in done] == wanted.long
    assert fleet.replicas[0].num_deaths == 1
    until(lambda: fleet.replicas[0].started is not None, WAIT_S)
    assert victim.started.pid not in _pids(fleet)


@pytest.mark.release
def test_a_conversation_outlives_its_replicas(fleet, model):
    """After kill -9 between turns and in the middle of one, tokens are those of one runtime.

    The journal belongs to this process, so a runtime continues after the fleet's last turn.
    """
    journal = fleet.options.conversations
    with Runtime.from_pretrained(model, conversations=journal, **OPTIONS) as rt:
        chat, alone = fleet.conversation("fleet"), rt.conversation("alone")
        first = chat.send(PROMPTS[0], SHORT)
        assert first.token_ids == alone.send(PROMPTS[0], SHORT).token_ids
        assert first.conversation_id == "fleet"
        with ThreadPoolExecutor() as threads:
            turn = threads.submit(chat.send, PROMPTS[1], LONG[0])
            until(lambda: any(state.num_unfinished for state in fleet.replicas), WAIT_S)
            time.sleep(0.1)
            busy = [state.num_unfinished for state in fleet.replicas].index(1)
            _kill(fleet.replicas[busy])
            assert turn.result(WAIT_S).token_ids == alone.send(PROMPTS[1], LONG[0]).token_ids
        until(lambda: all(state.started is not None for state in fleet.replicas), WAIT_S)
        num_deaths = fleet.replicas[1 - busy].num_deaths
        _kill(fleet.replicas[1 - busy])
        again = chat.send(PROMPTS[2], SHORT).token_ids
        assert again == alone.send(PROMPTS[2], SHORT).token_ids
        # It got the request first, because it had the pages.
        assert fleet.replicas[1 - busy].num_deaths == num_deaths + 1
        with pytest.raises(TurnTimeoutError, match="no answer after 0.001 s"):
            chat.send([1], replace(LONG[0], max_tokens=None), timeout_s=0.001)
        with pytest.raises(TokenOutOfRangeError):
            chat.send([VOCAB_SIZE], SHORT)
        with pytest.raises(TokenOutOfRangeError):
            list(chat.stream([VOCAB_SIZE], SHORT))
        streamed = [token for piece in chat.stream([2], SHORT) for token in piece.token_ids]
        assert tuple(streamed) == alone.send([2], SHORT).token_ids
        assert fleet.conversation("fleet") is chat and "alone" in fleet.conversations
        assert chat.token_ids == alone.token_ids == rt.conversation("fleet").token_ids
        again = asyncio.run(chat.asend([1], SHORT)).token_ids
        assert rt.conversation("alone").send([1], SHORT).token_ids == again
    until(lambda: all(state.started is not None for state in fleet.replicas), WAIT_S)


@pytest.mark.release
def test_a_stream_goes_on_when_its_replica_is_killed(fleet, wanted):
    """The tokens are those of one runtime, without repeats; leaving early ends the request."""
    stream = fleet.stream(PROMPTS[0], replace(LONG[0], seed=0))
    pieces = [next(stream)]
    (busy,) = (state for state in fleet.replicas if state.num_unfinished)
    _kill(busy)
    pieces += stream
    assert tuple(token for piece in pieces for token in piece.token_ids) == wanted.long[0]
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]
    until(lambda: all(state.started is not None for state in fleet.replicas), WAIT_S)

    async def first_piece() -> tuple[int, ...]:
        async with aclosing(fleet.astream(PROMPTS[0], replace(LONG[0], seed=0))) as pieces:
            return (await anext(pieces)).token_ids

    first = asyncio.run(first_piece())
    assert first == wanted.long[0][: len(first)]
    until(lambda: not any(state.num_unfinished for state in fleet.replicas), WAIT_S)
    with pytest.raises(EmptyPromptError):
        list(fleet.stream([]))


@pytest.mark.release
def test_requests_over_http_survive_a_killed_replica(fleet, wanted):
    """Every accepted request, streamed or not, has its whole answer; the server stays healthy."""
    options = ServerOptions(model_name="tiny", port=0, log_requests=False)

    def ask(url: str, number: int) -> list[int]:
        params = {"max_tokens": 1800, "temperature": LONG[number].temperature, "seed": number}
        body: dict[str, Any] = {"token_ids": list(PROMPTS[number]), "sampling_params": params}
        body["stream"] = bool(number % 2)
        answer = httpx2.post(url + "/inference/v1/generate", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        if not body["stream"]:
            return answer.json()["choices"][0]["token_ids"]
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]

    with running(fleet, options) as url, ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, url, number) for number in range(6)]
        until(lambda: all(state.num_unfinished for state in fleet.replicas), WAIT_S)
        time.sleep(0.1)
        _kill(fleet.replicas[0])
        assert [tuple(one.result(WAIT_S)) for one in asked] == wanted.long[:6]
        assert httpx2.get(url + "/health").status_code == 200
    until(lambda: all(state.started is not None for state in fleet.replicas), WAIT_S)


def _kill(state: ReplicaState) -> None:
    assert state.started is not None
    os.kill(state.started.pid, signal.SIGKILL)


@pytest.mark.release
def test_kv_goes_from_prefill_replicas_to_decode_replicas(ray, model, wanted):
    """Greedy and sampled answers are those of one runtime, also after kill -9 of either replica."""
    prompts = [list(PROMPTS[i]) + [i, *range(1, 90)] for i in range(6)]
    params = _seeded([replace(SHORT, temperature=0.9 * (i % 2)) for i in range(6)])
    with Runtime.from_pretrained(model, **OPTIONS) as rt:
        expected = [c.token_ids for c in rt.generate(prompts, params)]
    with Fleet(model, roles={"prefill": 1, "decode": 1}, **OPTIONS) as fleet:
        assert [state.role for state in fleet.replicas] == ["decode", "prefill"]
        assert [c.token_ids for c in fleet.generate(prompts[:2], params[:2])] == expected[:2]
        counts = fleet.stats()
        # Two or three pages of 32 tokens each, computed once.
        assert counts.num_prefix_hit == counts.num_prefix_hit_on_host >= 2 * 64
        for index, at in ((1, 2), (0, 4)):
            _kill(fleet.replicas[index])
            got = fleet.generate(prompts[at : at + 2], params[at : at + 2])
            assert [c.token_ids for c in got] == expected[at : at + 2]
            assert fleet.replicas[index].num_deaths == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"roles": {"prefill": 1}}, "roles={'prefill': 1}"),
        ({"roles": {"prefill": 1, "decode": 1}, "replicas": 2}, "without replicas"),
        ({"roles": {"prefill": 0, "decode": 1}}, "prefill"),
        ({"roles": {"prefill": 1, "decode": 1}, "policy": "vllm_like"}, "keeps no pages"),
        ({"roles": {"prefill": 1, "decode": 1}, "host_memory": 0}, "host_memory=0"),
        ({"roles": {"prefill": 1, "decode": 1}, "learns": True}, "learns"),
    ],
)
def test_roles_that_cannot_work_are_refused(model, arguments, said):
    """Before any process is started."""
    with pytest.raises(InvalidConfigError, match=said):
        Fleet(model, **arguments)


@pytest.mark.release
def test_bad_requests_fail_alone(fleet, wanted):
    """In a batch they are completions with an error; a single one raises."""
    first, empty, outside, last = fleet.generate(
        [PROMPTS[0], [], [VOCAB_SIZE], PROMPTS[2]], SamplingParams(max_tokens=20)
    )
    assert [first.token_ids, last.token_ids] == [wanted.long[0][:20], wanted.long[2][:20]]
    assert isinstance(empty.error, EmptyPromptError)
    assert isinstance(outside.error, TokenOutOfRangeError)
    with pytest.raises(EmptyPromptError):
        fleet.generate("")
    assert fleet.generate(PROMPTS[0], SamplingParams(max_tokens=5)).token_ids == wanted.long[0][:5]
    assert fleet.generate([]) == []


@pytest.mark.release
def test_a_cancelled_request_returns_what_there_is(fleet):
    """The completion has the tokens so far, whichever replica runs the request."""
    pending = fleet.submit([1, 2, 3], SamplingParams(max_tokens=None))
    until(lambda: sum(state.num_unfinished for state in fleet.replicas) == 1, WAIT_S)
    pending.cancel()
    assert pending.result(WAIT_S).finish_reason == "cancelled"


def _script(service: Service) -> list[tuple[int, ...]]:
    """Call every method of a service, and return the tokens."""
    prompt, params = PROMPTS[0], replace(SHORT, seed=1)
    pieces: list[Piece] = []
    refused: list[str] = []

    def look(piece: Piece) -> None:
        for waits in (service.generate, service.stream):
            with pytest.raises(InvalidRequestError, match="on another thread"):
                waits(prompt)
            refused.append(waits.__name__)
        pieces.append(piece)

    async def arun() -> list[tuple[int, ...]]:
        completions = await service.agenerate([prompt, PROMPTS[1]], params)
        async with aclosing(service.astream(prompt, params)) as stream:
            streamed = [token async for piece in stream for token in piece.token_ids]
        return [*(c.token_ids for c in completions), tuple(streamed)]

    alone = service.generate(prompt, params)
    batch = service.generate([PROMPTS[1], [VOCAB_SIZE]], params)
    assert isinstance(batch[1].error, TokenOutOfRangeError)
    submitted = service.submit(
        prompt,
        params,
        request_id="mine",
        priority=1,
        deadline_s=10.0,
        conversation_id="talk",
        on_piece=look,
    )
    done = submitted.result(WAIT_S)
    assert (submitted.request_id, done.request_id) == ("mine", "mine")
    assert done.conversation_id == "talk"
    assert refused[:2] == ["generate", "stream"]
    assert tuple(token for piece in pieces for token in piece.token_ids) == done.token_ids
    endless = service.submit(prompt, SamplingParams(max_tokens=None), request_id="mine")
    with pytest.raises(InvalidRequestError, match="'mine' is still running"):
        service.submit(prompt, request_id="mine")
    for wrong in ({"request_id": 3}, {"deadline_s": "3"}, {"deadline_s": 10**400}):
        with pytest.raises(InvalidRequestError, match="is not allowed"):
            service.submit(prompt, **wrong)
    service.cancel("mine")
    assert endless.result(WAIT_S).finish_reason == "cancelled"
    chat = service.conversation()
    turns = [chat.send(PROMPTS[1], params).token_ids, chat.send([1], params).token_ids]
    service.conversations.delete(chat.id)
    tokens = [alone, batch[0], done]
    assert service.stats().num_tokens >= sum(len(each.token_ids) for each in tokens)
    streamed = [token for piece in service.stream(prompt, params) for token in piece.token_ids]
    assert service.tokenizer is None and service.vocab_size == VOCAB_SIZE
    assert service.options.seed == OPTIONS["seed"]
    return [*(each.token_ids for each in tokens), *turns, tuple(streamed), *asyncio.run(arun())]


@pytest.mark.release
def test_a_runtime_and_a_fleet_are_one_service(fleet, model):
    """The same script runs on both, with the same tokens."""
    with Runtime.from_pretrained(model, **OPTIONS) as rt:
        assert _script(fleet) == _script(rt)


@pytest.mark.release
def test_the_command_line_serves_from_a_fleet(ray, model, tmp_path):
    """`jaxserve generate` with --replicas or --roles prints the same as without the option."""
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS[:4]))
    arguments = ("generate", "--jsonl", str(jobs), "--model", model, "--load", "random", "--quiet")
    sizes = ("--max-tokens", "8", "--max-slots", "4", "--max-context", "128")
    runs = [
        CliRunner().invoke(app, [*arguments, *sizes, *options])
        for options in ((), ("--replicas", "2"), ("--roles", "prefill=1,decode=1"))
    ]
    assert [run.exit_code for run in runs] == [0, 0, 0], [run.stderr for run in runs]
    alone, *fleets = (
        [json.loads(line)["token_ids"] for line in run.stdout.splitlines()] for run in runs
    )
    assert len(alone) == 4 and fleets == [alone, alone]


@pytest.mark.release
def test_an_id_of_the_fleets_own_is_refused(fleet):
    """A user's id can therefore not equal a generated one."""
    with pytest.raises(InvalidRequestError, match="'fleet-' are reserved"):
        fleet.submit([1], request_id="fleet-1")


@pytest.mark.release
def test_what_prevents_a_start_is_raised(ray, tmp_path):
    """The error has its own type, and no replica remains."""
    with pytest.raises(UnknownModelError, match="nowhere"):
        Fleet("nowhere", replicas=1, **OPTIONS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "odd"}))
    with pytest.raises(Exception, match="odd") as raised:
        Fleet(str(tmp_path), replicas=1, **OPTIONS)
    assert type(raised.value).__module__ == "jaxserve.core.errors"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"tensor_parallel": True}, "tensor_parallel=True"),
        ({"max_slot": 3}, "max_slot"),
        ({"seed": "abc"}, "seed='abc'"),
        ({"policy": "vlm"}, "vllm_like"),
        ({"record": "a.jsonl"}, "does not record"),
        ({"disk_memory": "1GB"}, "one folder"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    """They raise before the fleet connects to Ray."""
    with pytest.raises(InvalidConfigError, match=message):
        Fleet("smollm2-135m", **options)


@pytest.mark.release
def test_ray_is_an_extra(monkeypatch):
    """Without Ray a fleet names the package to install; importing jaxserve does not need Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"'\.\[fleet\]'"):
        Fleet("smollm2-135m")
    program = "import sys, jaxserve; jaxserve.Fleet; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


OWN_RAY = f"""
{HEED_INTERRUPTS}
import json, sys
from jaxserve import Fleet, SamplingParams

model, options, prompts = sys.argv[1], *map(json.loads, sys.argv[2:])
with Fleet(model, replicas=1, num_cpus=0.5, **options) as fleet:
    drawn = fleet.generate(prompts, SamplingParams(max_tokens=12, temperature=1.0))
    print(json.dumps([c.token_ids for c in drawn]), flush=True)
    try:
        fleet.generate([[1], [2], [3], [4]] * 50, SamplingParams(max_tokens=None))
    except KeyboardInterrupt as interrupted:
        done = interrupted.completions
        print(len(done), {{c.finish_reason for c in done}} >= {{"cancelled"}}, flush=True)
"""


@pytest.mark.release
def test_a_fleet_of_its_own_leaves_nothing_behind(model, wanted):
    """It starts and stops Ray, an interrupt has the tokens so far, and seeds are equal."""
    pytest.importorskip("ray")
    mark = f"jaxserve-test-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen(
        [sys.executable, "-c", OWN_RAY, model, json.dumps(OPTIONS), json.dumps(PROMPTS[:4])],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAXSERVE_TEST_MARK": mark},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        drawn = json.loads(process.stdout.readline())
        assert [tuple(tokens) for tokens in drawn] == wanted.drawn
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
        assert process.stdout.read() == "200 True\n"
        assert process.wait(WAIT_S) == 0
    until(lambda: not _marked(mark), WAIT_S)


@pytest.mark.release
def test_more_than_ray_has_is_refused():
    """Without the check the fleet would wait forever for resources."""
    has = {"CPU": 2.0}
    check_resources(has, 4, {"CPU": 0.5, "GPU": 0})
    with pytest.raises(InvalidConfigError, match=r"3 replicas .* need 3, but Ray has 2"):
        check_resources(has, 3, {"CPU": 1, "GPU": 0})
    with pytest.raises(InvalidConfigError, match="num_gpus"):
        check_resources(has, 1, {"CPU": 1, "GPU": 1})


def _marked(mark: str) -> list[str]:
    """Return the processes whose environment has this mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append(environ.parent.name)
        except OSError:
            continue
    return found
