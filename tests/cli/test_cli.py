"""The command line, on a tiny model with random weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import Mesh

from jaxserve.cli.opening import device_groups
from jaxserve.conversations import Journal
from jaxserve.sharding import StagePlan
from jaxserve.workload import recorded
from tests.cli.common import SMALL, assert_refused, run
from tests.common.processes import HEED_INTERRUPTS
from tests.common.tiers import some


def test_help_names_the_commands():
    """The first page lists every command."""
    shown = run("--help")
    assert shown.exit_code == 0
    commands = ("generate", "chat", "serve", "bench", "plan")
    for command in (*commands, "conversations", "models", "predictor"):
        assert command in shown.stdout


def test_help_is_quick():
    """No slow import happens before a command runs."""
    program = (
        "import sys, jaxserve.cli\n"
        "sys.exit(', '.join({'jax', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"loaded: {done.stderr}"


def _file(folder: Path, text: str) -> str:
    path = folder / "prompts"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        ("hi --temperature -1", "", "InvalidSamplingParamsError: temperature=-1"),
        ("hi --n 2", "", "identical samples"),
        ("hi --model no-such-model", "", "UnknownModelError: 'no-such-model'"),
        ("hi --policy best", "", "InvalidConfigError: policy='best'"),
        ("hi --kv-memory much", "", "InvalidConfigError: kv_memory: 'much'"),
        ("hi --kv-dtype int4", "", "InvalidConfigError: kv_dtype='int4'"),
        ("hi --host-memory 0GB", "", "InvalidConfigError: host_memory: '0GB'"),
        ("hi --disk-memory -1", "", "InvalidConfigError: disk_memory: '-1'"),
        ("hi --disk-folder pages", "", "used with disk_memory only"),
        ("hi --disk-memory 1MB --policy orca", "", "keeps no pages on the host"),
        ("hi --disk-memory 1MB --host-memory 0", "", "pass more host_memory"),
        ("hi --disk-memory 1MB --disk-folder /dev/null", "", "cannot be used"),
        ("hi --output no-such-folder/out", "", "cannot write --output"),
        ("hi --record no-such-folder/run", "", "cannot be written"),
        ("hi --data-parallel 4096", "", "needs 4096 devices"),
        ("hi --replicas 0", "", "InvalidConfigError: replicas=0"),
        ("hi --replicas 2 --stages 1,1", "", "cannot be combined with --stages"),
        ("hi --groups 1", "", "groups='1' is not understood"),
        ("hi --groups 1/0", "", "tensor=0 is not allowed"),
        ("hi --groups 4096/2x1,1", "", "needs 4096 devices"),
        ("hi --groups 1/1 --stages 1,1", "", "cannot be combined with --stages"),
        ("hi --groups 1/1", "", "policy='auto' plans for one"),
        ("hi --replicas 2 --groups 1/1", "", "cannot be combined with --stages"),
        ("hi --roles prefill=1", "", "numbers of both roles"),
        ("hi --roles prefill=1,decode=two", "", "numbers of both roles"),
        ("hi --roles prefill=1,prefill=1,decode=1", "", "numbers of both roles"),
        ("hi --roles prefill=0,decode=1", "", "roles['prefill']=0"),
        ("hi --roles prefill=1,decode=1 --replicas 2", "", "omit --replicas"),
        ("hi --roles prefill=1,decode=1 --groups 1/1", "", "--roles cannot be"),
        ("hi --roles prefill=1,decode=1 --policy orca", "", "keeps no pages"),
        ("hi --replicas 2 --record run", "", "a fleet does not record"),
        ("hi --replicas 2 --disk-memory 1MB", "", "would write to one folder"),
        ("hi --max-tokens many", "", "--max-tokens"),
        ("hi --no-such-option", "", "--no-such-option"),
        ("", "", "exactly one way"),
        ("hi --file {file}", "hello", "exactly one way"),
        ("--file {file}", "\n \n", "holds no prompts"),
        ("--file {file}.missing", "", "cannot read prompts"),
        ("--jsonl {file}", '{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ("--jsonl {file}", '"just text"', "line 1: a line must be an object"),
        ("--jsonl {file}", '{"prompt": "a", "top": 3}', "unknown field(s) top"),
        ("--jsonl {file}", '{"prompt": "a", "messages": []}', "exactly one of prompt"),
        ("--jsonl {file}", '{"prompt": 3}', "prompt=3 is not allowed"),
        ("--jsonl {file}", '{"prompt": "a", "top_p": 2}', "line 1: top_p=2"),
        ("--jsonl {file}", '{"prompt": "a", "logit_bias": {"x": 1}}', "not a token id"),
        ("--jsonl {file}", '{"prompt": "a", "logit_bias": {"\u00b2": 1}}', "not a token id"),
        ("--jsonl {file}", '{"prompt": "a", "logit_bias": {"%s": 1}}' % ("9" * 5000), "token id"),
        ("--jsonl {file}", '{"prompt": [%s]}' % ("9" * 5000), "line 1 cannot be read"),
        ("--jsonl {file}", "[" * 100_000, "line 1 cannot be read"),
    ],
)
def test_bad_input_of_generate(tmp_path, arguments, text, said):
    """A bad option or file exits with 2 and one message, without a traceback."""
    file = _file(tmp_path, text)
    assert_refused(run(f"generate {arguments.replace('{file}', file)}"), said)


@pytest.mark.release
def test_prompts_and_answers_on_separate_devices(model):
    """Both groups are split as the option says; the answer is that of one device."""
    common = f"generate hello --ignore-eos --max-tokens 5 --model {model} {SMALL}"
    alone = run(common)
    groups = run(f"{common} --policy exegpt_waa_m --groups 1/2")
    assert (alone.exit_code, groups.exit_code) == (0, 0), groups.stderr
    assert alone.stdout == groups.stdout and alone.stdout.strip()


def test_groups_may_have_stages():
    """The first devices are for prompts, and each stage of the others has its own number."""
    groups = device_groups("2/1,1x2")
    assert isinstance(groups.encode, Mesh) and isinstance(groups.decode, StagePlan)
    assert groups.encode.size == 2
    assert [stage.num_shards for stage in groups.decode.stages] == [1, 2]
    assert [len(devices) for devices in groups.devices] == [2, 3]
    counted = device_groups("2*20x1/40x2")
    assert isinstance(counted.encode, StagePlan)
    assert [stage.num_shards for stage in counted.encode.stages] == [1, 1]
    assert [len(devices) for devices in counted.devices] == [2, 2]


@pytest.mark.release
@pytest.mark.parametrize("replicas", some(["1", "2"]))
def test_generate_answers_in_order(model, tmp_path, replicas):
    """Each JSON line has its answer, with its own parameters; a bad line does not affect others."""
    lines = [
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {"id": "empty", "prompt": []},
        {"id": "tokens", "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 1},
        {"prompt": "text", "n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 2},
    ]
    file = _file(tmp_path, "\n".join(json.dumps(line) for line in lines))
    out, trace = tmp_path / "answers.jsonl", tmp_path / "run.jsonl"
    done = run(
        f"generate --jsonl {file} --output {out} --ignore-eos --raw --record {trace} "
        f"--data-parallel {replicas} --model {model} {SMALL}"
    )
    assert done.exit_code == 1, done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == ["chat", "empty", "tokens", 3]
    chat, empty, tokens, samples = answers
    assert (chat["output_tokens"], chat["prompt_tokens"]) == (3, len("user: hi\nassistant: "))
    assert (empty["finish_reason"], empty["error"]["type"]) == ("error", "EmptyPromptError")
    assert (tokens["prompt_tokens"], len(tokens["logprobs"])) == (3, 4)
    assert [sample["output_tokens"] for sample in samples["samples"]] == [2, 2]
    assert "prompt empty: EmptyPromptError" in done.stderr
    assert [r.num_output_tokens for r in recorded.read(trace)] == [(3,), (4,), (2, 2)]


def test_batches_go_on_where_they_stopped(model, tmp_path):
    """Good answers are kept, others are asked again, and a cut line is none; the exit code is 1."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [line, {**line, "custom_id": "b", "url": "/v1/files"}, {**line, "custom_id": "c"}]
    file = _file(tmp_path, "\n" + "\n".join(map(json.dumps, lines)))
    kept = {"custom_id": "a", "response": {"status_code": 200, "body": "earlier"}, "error": None}
    failed = {"custom_id": "b", "response": None, "error": {"code": "before"}}
    out = tmp_path / "out.jsonl"
    out.write_text("\n".join([json.dumps(kept), json.dumps(failed), '{"custom_id": "c", "resp']))
    assert_refused(run(f"generate --jsonl {file}"), f"run-batch -i {file}")
    done = run(f"run-batch -i {file} -o {out} --model {model} {SMALL}")
    assert done.exit_code == 1 and "1 requests failed" in done.stderr
    assert f"1 requests are answered in {out} already" in done.stderr
    first, *others = map(json.loads, out.read_text().splitlines())
    bad, good = sorted(others, key=lambda each: each["custom_id"])
    assert first == kept
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == ("b", None, "invalid_line")
    assert (good["custom_id"], good["response"]["status_code"]) == ("c", 200)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".kept"]


def test_text_prompts_become_chats(model):
    """A model with a chat template gets it by default, and not with --raw."""
    hi = f"generate hi --max-tokens 2 --model {model} {SMALL}"
    chat = json.loads(run(f"{hi} --system be").stdout)
    assert chat["prompt_tokens"] == len("system: be\nuser: hi\nassistant: ")
    raw = json.loads(run(f"{hi} --raw").stdout)
    assert (raw["prompt_tokens"], raw["prompt"]) == (2, "hi")
    empty = run(f"generate --model {model} {SMALL}", "")
    assert empty.exit_code == 1 and "EmptyPromptError" in empty.stderr


def test_chat_converses(model):
    """The terminal loop answers, resets on /reset, refuses unknown commands, and leaves."""
    done = run(
        f"chat --model {model} --max-context 64 --max-tokens 4 --quiet --load random",
        given="hi\n/reset\n/dance\n" + "x" * 80 + "\nho\n/exit\nnever\n",
    )
    assert done.exit_code == 0, done.stderr
    assert "(a new conversation)" in done.stderr
    assert "unknown command /dance" in done.stderr
    assert "PromptTooLongError" in done.stderr
    assert done.stdout.count("> ") == 6


def test_a_chat_is_kept_and_goes_on(model, tmp_path, monkeypatch):
    """--id continues the chat in a later run; the chat is listed, shown, exported and deleted."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "data" / "jaxserve" / "conversations.sqlite"
    chat = f"chat --model {model} --max-context 128 --max-tokens 4 --quiet --load random --id mine"
    for i, said in enumerate(("my secret\n", "so?\n/exit\n")):
        done = run(chat, given=said)
        assert done.exit_code == 0, done.stderr
        assert ("continues after 1 turns" in done.stderr) == (i == 1)
        assert f"continue with: jaxserve chat --journal {path} --id mine" in done.stderr
    listed = run("conversations list").stdout
    assert "mine" in listed and " 2 " in listed
    shown = run("conversations show mine").stdout
    assert shown.startswith("user: my secret\n\nassistant: ") and "user: so?\n" in shown
    out = tmp_path / "out.jsonl"
    assert run(f"conversations export --tokens -o {out}").exit_code == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert [m["role"] for m in line["messages"]] == ["user", "assistant"] * 2
    assert [len(turn["answer_token_ids"]) for turn in line["turns"]] == [4, 4]
    assert line["turns"][1]["num_kept"] == len("user: my secret\nassistant: ") + 4
    assert json.loads(run("conversations export mine").stdout)["id"] == "mine"

    refused = run("conversations delete mine", given="n\n")
    assert refused.exit_code == 0 and "mine" in run("conversations list").stdout
    assert run("conversations delete mine --yes").exit_code == 0
    assert "mine" not in run("conversations list").stdout
    assert all(b"my secret" not in file.read_bytes() for file in path.parent.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("list", 1, "there is no journal"),
        ("list --journal {text}", 1, "not a journal"),
        ("show unknown --journal {kept}", 2, "UnknownConversationError"),
        ("export unknown --journal {kept}", 2, "UnknownConversationError"),
        ("export -o no/folder --journal {kept}", 2, "cannot write --output"),
        ("delete unknown --yes --journal {kept}", 2, "UnknownConversationError"),
        ("delete --journal {kept}", 2, "--all"),
        ("delete a --all --journal {kept}", 2, "not both"),
    ],
)
def test_bad_input_of_conversations(tmp_path, monkeypatch, arguments, code, said):
    """Each error is one message and an exit code, without a traceback."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    files = {"text": _file(tmp_path, "no journal " * 500), "kept": str(tmp_path / "kept")}
    Journal(files["kept"]).close()
    assert_refused(run(f"conversations {arguments.format(**files)}"), said, code)


@pytest.mark.release
def test_pages_go_to_the_folder_that_is_named(model, tmp_path):
    """The next command uses the same folder, and has the same answer."""
    line = (
        f"generate {'a' * 50} --max-tokens 4 --raw --model {model} {SMALL} "
        f"--host-memory 1MB --disk-memory 4MB --disk-folder {tmp_path / 'kv'}"
    )
    answers = [run(line) for _ in range(2)]
    assert answers[0].exit_code == 0, answers[0].stderr
    assert answers[0].stdout == answers[1].stdout
    assert (tmp_path / "kv" / "0").is_dir()


def test_models_are_listed_and_described(model):
    """`models list` names the default model, `models show` reads a folder's configuration."""
    assert "smollm2-135m" in run("models list").stdout
    shown = run(f"models show {model}")
    assert shown.exit_code == 0, shown.stderr
    assert "hidden_size" in shown.stdout
    assert_refused(run("models show no-such-model"), "UnknownModelError")


@pytest.mark.release
def test_interrupt_keeps_what_is_finished(model, tmp_path):
    """Ctrl-C writes the answers that are finished and exits with 130."""
    jobs = [{"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 15_000}]
    file = _file(tmp_path, "\n".join(json.dumps(job) for job in jobs))
    program = f"{HEED_INTERRUPTS}; from jaxserve.cli import main; main()"
    line = (
        f"generate --jsonl {file} --ignore-eos --raw --model {model} --load random --max-slots 1 "
        "--max-context 16384"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    )
    assert process.stderr is not None
    said = ""
    # The progress bar, which appears after two seconds, shows when the first answer is finished.
    while " 1/2 " not in said and (letter := process.stderr.read(1)):
        said += letter
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=60)
    assert process.returncode == 130, said + rest
    assert [json.loads(line)["id"] for line in out.splitlines()] == [0]
    assert rest.endswith("interrupted\n") and "Traceback" not in said + rest


@pytest.mark.release
def test_no_interrupt_is_lost_in_the_garbage_collector():
    """JAX runs a Python function at each collection, whose errors Python drops.

    In a process of its own: the collector would also find what tests before it have left.
    """
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "20"), done.stderr


_INTERRUPTED = """
import contextlib, gc, json, os, signal, sys, threading, time, types
import jax
from jaxserve.cli.app import heed_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)
jax.devices()
assert any(isinstance(callback, types.FunctionType) for callback in gc.callbacks)
heed_interrupts()
text, num_noticed = json.dumps([[i] for i in range(3000)]), 0
for _ in range(20):
    timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    end_s = time.monotonic() + 20
    with contextlib.suppress(KeyboardInterrupt):
        timer.start()
        while time.monotonic() < end_s:
            json.loads(text)
    num_noticed += time.monotonic() < end_s
print(num_noticed)
"""


@pytest.mark.release
def test_an_unknown_model_is_one_line():
    """No thread that was begun outlives the error, whose end would be a second message."""
    command = [sys.executable, "-m", "jaxserve", "generate", "hi", "--model", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("UnknownModelError: 'no-such-model'")
