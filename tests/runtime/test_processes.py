"""Several processes on one machine serve like one process, and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxserve import Runtime, SamplingParams, sharding
from jaxserve.sharding import processes
from jaxserve.testing import tiny
from tests.common.processes import HEED_INTERRUPTS, one_device_environment
from tests.runtime.job import OPTIONS, PARAMS, PROMPTS, WEIGHT_SEEDS, model, params

ROOT = Path(__file__).parents[2]
LAUNCH_LOCAL = str(ROOT / "scripts" / "launch_local.sh")
JOB = (sys.executable, "-m", "tests.runtime.job")
CLI = (sys.executable, "-c", f"{HEED_INTERRUPTS}; from jaxserve.cli import main; main()")
# A job of two processes without devices: the leader hangs in a step, the follower in its program.
_HANGS = """
import sys, time
from multiprocessing.connection import Client, Listener
from jaxserve.sharding import ProcessGroup

if sys.argv[1] == "leader":
    with Listener(("127.0.0.1", 0)) as listener:
        print(listener.address[1], flush=True)
        group = ProcessGroup(0, 2, {1: listener.accept()}, {1: "far"}, step_s=1)
    with group.step() as step:
        step.submitted(lambda: False)
else:
    group = ProcessGroup(1, 2, {0: Client(("127.0.0.1", int(sys.argv[2])))}, {})
    print("connected", flush=True)
time.sleep(600)
"""
HANGS = (sys.executable, "-c", _HANGS)
BAMBA = dict(
    model_type="bamba",
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    attn_layer_indices=[1],
    num_attention_heads=6,
    num_key_value_heads=2,
    mamba_n_heads=6,
    mamba_n_groups=2,
    mamba_d_head=16,
    mamba_d_state=10,
    mamba_d_conv=3,
    max_position_embeddings=256,
)
CONFIG = tiny.CONFIG | {"num_hidden_layers": 1, "max_position_embeddings": 1 << 14}


def _start(*command: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=one_device_environment() | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def _job(
    num_processes: int, *command: str, **environ: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the processes of a job; no process remains, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environ |= {
            "JAXSERVE_COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}",
            "JAXSERVE_NUM_PROCESSES": str(num_processes),
        }
    started = [
        _start(*command, JAXSERVE_PROCESS_ID=str(i), **environ) for i in range(num_processes)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _group_is_gone(process: subprocess.Popen[str]) -> bool:
    """Return whether all processes of this one's session have ended."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """The answers of one process with one device, for each of the weights."""
    tokens = []
    with Runtime(model(), **OPTIONS) as rt:
        for seed in WEIGHT_SEEDS:
            rt.update_params(params(seed))
            tokens.append([list(c.token_ids) for c in rt.generate(PROMPTS, PARAMS)])
    return tokens


def _is_ours(line: str) -> bool:
    """Whether a line of standard output is not one of XLA's collectives."""
    return not line.startswith("[Gloo]")


def test_two_processes_answer_like_one(alone):
    """They agree for new weights after a dismissal too; a follower refuses to answer."""
    with _job(2, *JOB, "rounds") as started:
        (answers, leader_err), (out, err) = [p.communicate(timeout=120) for p in started]
    assert [process.returncode for process in started] == [0, 0], leader_err + err
    assert [json.loads(line) for line in answers.splitlines() if _is_ours(line)] == alone
    assert out == ""
    assert "ProcessGroupError" in err and "process 0" in err and "rt.follow()" in err


@pytest.mark.release
def test_two_processes_swap_pages_to_their_hosts(alone):
    """Each has its shards of a page. Sequences are preempted, and cached pages come back."""
    with _job(2, *JOB, "swaps") as started:
        (answers, leader_err), (_, err) = [p.communicate(timeout=120) for p in started]
    assert [process.returncode for process in started] == [0, 0], leader_err + err
    *lines, counts = filter(_is_ours, answers.splitlines())
    assert [json.loads(line) for line in lines] == [*alone, alone[-1]]
    assert all(int(count) > 0 for count in counts.split()), counts


@pytest.mark.release
@pytest.mark.parametrize(
    ("num_processes", "what", "groups"), [(2, "rounds", "0/1"), (3, "lossy", "1/0,2")]
)
def test_groups_in_several_processes_answer_like_one(alone, num_processes, what, groups):
    """The pool preempts, pages are lost, weights change, and a plan is adopted.

    Prompts and answers are computed in a process each; then prompts in a follower, and answers in
    the leader and another follower.
    """
    with _job(num_processes, *JOB, what, groups) as started:
        ended = [process.communicate(timeout=200) for process in started]
    said = "".join(err for _, err in ended)
    assert [process.returncode for process in started] == [0] * num_processes, said
    assert "KV passes through the host" not in said  # devices pull from other processes' devices
    answers = [json.loads(line) for line in ended[0][0].splitlines() if _is_ours(line)]
    assert answers == [*alone, alone[-1]]
    counts = ended[0][1].splitlines()[-1].split()
    num_preemptions, num_handed_over, num_lost = map(int, counts)
    assert num_preemptions > 0 and num_handed_over > 0 and (num_lost > 0) == (what == "lossy")


@pytest.mark.release
@pytest.mark.parametrize("groups", ["0/1", "1/0"])
def test_a_process_that_dies_in_a_handover_ends_the_leader(groups):
    """It is killed before it gets the pages, or before it sends them; nothing hangs."""
    with _job(2, *JOB, "dies", groups) as started:
        _, err = started[0].communicate(timeout=120)
        assert started[1].wait(timeout=30) == -signal.SIGKILL
    assert started[0].returncode == 1
    assert "process 1 of 2" in err and "has died" in err and "start all processes again" in err


@pytest.mark.release
@pytest.mark.parametrize(("num_processes", "victim"), [(2, 0), (4, 2)])
def test_a_killed_process_ends_all(alone, num_processes, victim):
    """In the middle of answers it takes seconds; each prints its name and exits with an error."""
    with _job(num_processes, *JOB, "forever") as started:
        assert started[0].stdout is not None
        lines = filter(_is_ours, started[0].stdout)
        assert [json.loads(next(lines)) for _ in WEIGHT_SEEDS] == alone
        time.sleep(0.5)
        started[victim].kill()
        killed_s = time.monotonic()
        rest = [process for i, process in enumerate(started) if i != victim]
        said = [process.communicate(timeout=30)[1] for process in rest]
        assert time.monotonic() - killed_s < 10
    for process, err in zip(rest, said, strict=True):
        assert process.returncode > 0, err
        assert f"process {victim} of {num_processes}" in err and "has died" in err
        assert "start all processes again" in err


@pytest.mark.release
@pytest.mark.parametrize(
    ("is_stopped", "said"),
    [
        (False, "process 1 of 2 on far began 0 steps, and others 1"),
        (True, "process 1 of 2 on far did not answer"),
    ],
)
def test_a_hang_ends_all_processes(is_stopped, said):
    """Each prints the same line and exits with code 1; a stopped process cannot."""
    leader = _start(*HANGS, "leader")
    assert leader.stdout is not None
    follower = _start(*HANGS, "follower", leader.stdout.readline().strip())
    try:
        assert follower.stdout is not None and follower.stdout.readline() == "connected\n"
        if is_stopped:
            follower.send_signal(signal.SIGSTOP)
        ended = [leader] if is_stopped else [leader, follower]
        for process in ended:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1, err
            assert "a step has not ended within 1 s (JAXSERVE_STEP_TIMEOUT sets the limit)" in err
            assert said in err and "start all processes again" in err
    finally:
        for process in (leader, follower):
            process.kill()
            process.communicate()


@pytest.mark.release
def test_options_must_be_alike():
    """All processes print the difference and fail."""
    with _job(2, *JOB, "differ") as started:
        said = [process.communicate(timeout=120)[1] for process in started]
    assert all(process.returncode > 0 for process in started)
    for err in said:
        assert "max_slots is 2 on process 0 and 3 on process 1" in err


@pytest.mark.release
@pytest.mark.parametrize("process_id", ["0", "1"])
def test_a_missing_process_ends_the_others(process_id):
    """After the start-up timeout the others exit, with the address in the message."""
    with _job(2, *JOB, "rounds", JAXSERVE_START_TIMEOUT="3") as started:
        other = started[1 - int(process_id)]
        other.kill()
        process = started[int(process_id)]
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"process {process_id} of 2" in err and "waited 3 s, but not all" in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder with a configuration, and without tokenizer and weights."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return str(path)


def _launch(
    folder: str, *arguments: str, devices: int = 1, slots: int = 1
) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environ = {} if devices == 1 else {"XLA_FLAGS": flags}
    fixed = ("--model", folder, "--load", "random", "--raw", "--ignore-eos")
    fixed = (*fixed, "--max-slots", str(slots))
    return _start(LAUNCH_LOCAL, "2", *CLI, "generate", *arguments, *fixed, **environ)


def _prompts(folder: Path, *max_tokens: int) -> str:
    path = folder / "prompts.jsonl"
    lines = [{"prompt": [5, 6, 7], "max_tokens": most} for most in max_tokens]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.release
def test_the_launched_command_answers_once(folder, tmp_path):
    """`launch_local.sh` runs the command line; a terminal's Ctrl-C goes to the whole job.

    Finished answers are printed once, the exit code is 130, and no process remains.
    """
    jobs = _prompts(tmp_path, 2, 15_000)
    launched = _launch(folder, "--jsonl", jobs, "--tensor-parallel", "2")
    assert launched.stderr is not None
    said = ""
    # The progress bar, which appears after two seconds, shows when the first answer is finished.
    while " 1/2 " not in said and (letter := launched.stderr.read(1)):
        said += letter
    os.killpg(launched.pid, signal.SIGINT)
    out, rest = launched.communicate(timeout=120)
    assert launched.returncode == 130, said + rest
    assert [json.loads(line)["output_tokens"] for line in out.splitlines()] == [2]
    assert "Traceback" not in said + rest
    assert _group_is_gone(launched)


@pytest.mark.release
def test_states_of_recurrent_layers_are_split_over_processes(tmp_path):
    """Prompts that begin alike, in two slots, continue from states; tokens are one process's.

    There is room for one state on the devices, so that others go to the host and come back.
    """
    (tmp_path / "config.json").write_text(json.dumps(BAMBA))
    first = list(range(5, 45))
    prompts = [first, [*first, 7, 8, 9], [*first, 3], first[:20], [*first, 4]]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = dict(load="random", max_slots=2, progress=False, state_memory="16kB")
    with Runtime.from_pretrained(tmp_path, **options) as rt:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        wanted = [list(answer.token_ids) for answer in rt.generate(prompts, params)]
        assert rt.stats().num_snapshots_in > 0
    jobs = ("--jsonl", str(tmp_path / "prompts.jsonl"), "--max-tokens", "12", "--temperature", "0")
    jobs = (*jobs, "--state-memory", "16kB")
    launched = _launch(str(tmp_path), *jobs, "--tensor-parallel", "2", slots=2)
    out, err = launched.communicate(timeout=240)
    assert launched.returncode == 0, err
    assert [json.loads(line)["token_ids"] for line in out.splitlines() if _is_ours(line)] == wanted


@pytest.mark.release
def test_a_mesh_must_reach_all_processes(folder, tmp_path):
    """A mesh with fewer devices than the processes have is refused on all of them."""
    launched = _launch(folder, "--jsonl", _prompts(tmp_path, 4), "--tensor-parallel", "1")
    out, err = launched.communicate(timeout=120)
    assert (launched.returncode, out) == (2, "")
    assert err.count("pass --tensor-parallel 2") == 2
    assert _group_is_gone(launched)


@pytest.mark.release
@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("1/3", "process(es) [0] of 2 would have devices of both groups"),
        ("2/1x2", "1x2 is not allowed where the devices of a mesh belong to several processes"),
    ],
)
def test_groups_that_cannot_be_divided_among_processes(folder, tmp_path, groups, said):
    """A process with devices of both groups, or a group with stages, is refused on all of them."""
    prompts = _prompts(tmp_path, 4)
    policy = ("--groups", groups, "--policy", "exegpt_waa_c")
    launched = _launch(folder, "--jsonl", prompts, *policy, devices=2)
    out, err = launched.communicate(timeout=120)
    assert (launched.returncode, out) == (2, "")
    assert err.count(said) == 2
    assert _group_is_gone(launched)


@pytest.mark.parametrize(
    ("environ", "given", "said"),
    [
        ({}, dict(num_processes=2), "coordinator, process_id missing"),
        ({"JAXSERVE_PROCESS_ID": "1"}, {}, "coordinator, num_processes missing"),
        ({}, dict(coordinator="here", num_processes=2, process_id=0), "pass host:port"),
        ({}, dict(coordinator="a:1", num_processes=2, process_id=2), "ids go from 0"),
        ({}, dict(coordinator="a:1", num_processes=0, process_id=0), "at least 1"),
        ({}, dict(num_processes=1, process_id=1), "coordinator missing"),
        ({"JAXSERVE_NUM_PROCESSES": "two"}, {}, "JAXSERVE_NUM_PROCESSES='two'"),
        ({"JAXSERVE_START_TIMEOUT": "0"}, dict(), "timeout of 0"),
    ],
)
def test_settings_are_checked(monkeypatch, environ, given, said):
    """The error comes before anything starts, with the given and the allowed values."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        sharding.join(**given)


def test_one_process_need_not_join(monkeypatch):
    """A job of one process, with or without the settings, is not a group."""
    assert sharding.join() is None
    monkeypatch.setenv(processes.NUM_PROCESSES_VARIABLE, "1")
    assert sharding.join() is None
    assert sharding.join("a:1", 1, 0) is None
