"""`jaxserve plan`, for simulated clusters and for a tiny model on this machine."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import pytest

from jaxserve.cli.plan import layers_path
from jaxserve.models.families import config_from_hf
from jaxserve.planning.layers import LayerOrigin, LayerProfile, LayerSizes, measure_layers
from tests.cli.common import TOKEN_CONFIG, assert_refused, run
from tests.common.tiers import some
from tests.planning.layers.made_up import MadeUpTimer

SIMULATED = "plan --model OPT-13B --cluster A40 --devices 4 --num-bounds 3"
# The schedules of the paper alone.
PAPERS = f"{SIMULATED} --policies rra,waa"
SMALL = "--load random --max-slots 1 --max-context 32 --quiet"


@pytest.fixture
def lengths(tmp_path) -> str:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt,output\n" + "".join(f"{4 + i % 9},{1 + i % 13}\n" for i in range(60)))
    return str(path)


@pytest.mark.release
def test_a_simulated_cluster_is_planned_at_once(tmp_path):
    """The frontier, the chosen schedules and their neighbours are printed, and drawn on request."""
    picture = tmp_path / "frontier.png"
    done = run(f"{PAPERS} --task S -b 5 -b inf --picture {picture}")
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    for text in ("OPT-13B on 4 A40", "task S", "WAA-C", "2*20x1/40x2", "chosen for bound 5 s"):
        assert text in said, text
    assert "chosen for no bound" in said and "misses the bound" in said and "B_E + 1" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.release
def test_json_has_the_frontier_the_choice_and_its_neighbours():
    """One JSON object has every figure; the bound that was asked for is kept."""
    done = run(f"{PAPERS} --task S -b 5 --json --quiet")
    said = json.loads(done.stdout)
    (chosen,) = said["chosen"]
    assert chosen["latency_bound_s"] == 5 >= chosen["latency_s"] and chosen["fits"]
    assert {"B_E - 1", "B_E + 1"} <= set(chosen["neighbours"])
    most = said["frontier"][-1]["answers_per_s"]
    assert said["frontier"][0]["answers_per_s"] < chosen["answers_per_s"] < most
    tight = run(f"{PAPERS} --task S --first-token-bound 0.3 --json --quiet")
    (within,) = json.loads(tight.stdout)["chosen"]
    assert within["latency_bound_s"] is None
    assert within["first_token_s"] <= 0.3 < said["frontier"][-1]["first_token_s"]


def test_a_cluster_may_be_planned_for_continuous_batching():
    """It is a family as others are, with chunks among its figures; unknown ones are refused."""
    asked = f"{SIMULATED} --task S --num-bounds 2 --json --quiet"
    (chosen,) = json.loads(run(f"{asked} --policies continuous").stdout)["chosen"]
    assert chosen["policy"] == "continuous" and chosen["max_running"] > 1
    assert chosen["chunk_tokens"] and set(chosen["neighbours"]) <= {"B - 1", "B + 1"}
    assert_refused(run(f"{asked} --policies static"), "pass some of ('rra', 'waa', 'continuous')")


@pytest.mark.release
@pytest.mark.parametrize("bound", some(["--first-token-bound 0.3", "--token-bound 0.03"]))
def test_neighbours_that_miss_any_bound_are_marked(bound):
    """A neighbour that misses a bound on tokens is marked, and the title names the bound."""
    done = run(f"{PAPERS} --task S {bound} --quiet")
    assert done.exit_code == 0, done.stderr
    title, *rows = done.stdout.partition("chosen for ")[2].splitlines()
    assert title.split()[-2:] in (["0.3", "s"], ["30", "ms"])
    (chosen,) = (row for row in rows if row.split()[:1] == ["chosen"])
    (beside,) = (row for row in rows if "B_E + 1" in row)
    assert "misses the bound" in beside and "misses" not in chosen


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("", 2, "exactly one way: --task or --lengths"),
        ("--task S --lengths x", 2, "exactly one way"),
        ("--task X", 2, "--task 'X' is unknown; pass one of S, T, G, C1, C2"),
        ("--lengths no-such-file", 2, "cannot read lengths"),
        ("--task S -b 0", 2, "latency_s=0.0 is not allowed"),
        ("--task S -b soon", 2, "-b"),
        ("--task S -b 0.1", 1, "InfeasibleBoundError: no schedule keeps latency_s=0.1"),
        ("--task S --num-bounds 1", 2, "num_bounds=1 is not allowed"),
        ("--task S --devices 0", 2, "num_devices=0"),
        ("--task S --model GPT3-175B", 1, "DeviceMemoryError"),
        ("--task S --cluster A4", 2, "--cluster 'A4' is unknown; pass one of A40"),
        ("--task S --model smollm2-135m", 2, "has no shape for --cluster"),
        ("--task S --layers", 2, "--cluster and --layers cannot be combined"),
        ("--task S --picture frontier.txt", 2, "ends in .png, .svg or .pdf"),
        ("--task S --picture no-such-folder/f.png", 2, "cannot write --picture"),
    ],
)
def test_bad_input(arguments, code, said):
    """Bad input ends with one sentence and an exit code, without a traceback."""
    assert_refused(run(f"{SIMULATED} --quiet {arguments}"), said, code)


@pytest.mark.release
def test_devices_belong_to_a_cluster():
    """A number of devices without a simulated cluster is refused."""
    for options, said in (
        ("--devices 4", "needs --cluster or --layers"),
        ("--layers --tensor-parallel 2", "omit --tensor-parallel"),
        ("--layers --quantize keep", "pass 'int8' or 'int4'"),
    ):
        assert_refused(run(f"plan --task S {options}"), said)


@pytest.mark.parametrize("where", ["", "--layers", "--groups 1/1"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [("--num-bounds 1", "num_bounds=1 is not"), ("--policies no", "policies=('no',) is not")],
)
def test_bad_options_are_refused_before_anything_is_measured(
    where, wrong, said, tmp_path, monkeypatch
):
    """Neither the model is looked for nor a profile is kept."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    assert_refused(run(f"plan --task S --model {tmp_path}/none {where} {wrong}"), said)
    assert not list(tmp_path.iterdir())


_ENGINE = ("--load random", "--kv-memory 1GiB", "--groups 1/1")
_MACHINE = (
    *_ENGINE,
    "--profile times.json",
    "--measure-again",
    "--dtype float32",
    "--kv-dtype int8",
    "--quantize int8",
    "--quantize-embeddings int4",
    "--max-slots 4",
    "--max-context 64",
    "--tensor-parallel 2",
)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("--model OPT-13B --cluster A40", _MACHINE),
        ("--layers", _ENGINE),
        ("--profile times.json", ("--measure-again",)),
        ("--layers --profile times.json", ("--measure-again",)),
    ],
)
def test_options_without_an_effect_are_refused(mode, options):
    """An option that the way of planning does not use is named in one sentence, alone or not."""
    for given in (*((option,) for option in options), options):
        done = run(f"plan --task S --quiet {mode} {' '.join(given)}")
        names = ", ".join(option.split()[0] for option in given)
        assert_refused(done, f"InvalidConfigError: {names} would have no effect with")


@pytest.mark.release
def test_an_engine_is_measured_once(token_model, lengths, tmp_path, monkeypatch):
    """The first call measures and keeps step times, the next one reads them; both agree."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    asked = f"plan --model {token_model} --lengths {lengths} --num-bounds 3 {SMALL}"
    first = run(f"{asked} --json")
    assert first.exit_code == 0, first.stderr
    (kept,) = (tmp_path / "cache" / "profiles").iterdir()
    written = kept.stat().st_mtime_ns
    again = run(f"{asked} --json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert kept.stat().st_mtime_ns == written
    said = json.loads(first.stdout)
    assert said["lengths"] == "60 answers of lengths.csv"
    assert said["chosen"][0]["policy"] in ("rra", "continuous")
    picture = tmp_path / "frontier.png"
    limited = run(f"{asked} --policies continuous --picture {picture}")
    assert "chosen for no bound" in limited.stdout and "continuous" in limited.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(f"{asked} --policies waa").exit_code == 2
    # A damaged file that is named is refused.
    kept.write_text("{}")
    assert_refused(run(f"{asked} --profile {kept}"), "InvalidProfileError", 1)


@pytest.mark.release
def test_two_groups_of_devices_are_planned(token_model, lengths, tmp_path, monkeypatch):
    """Their times are measured and kept once; the table has WAA's sizes, with B_D's neighbours."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    small = SMALL.replace("--max-slots 1", "--max-slots 4")
    asked = f"plan --model {token_model} --lengths {lengths} --num-bounds 3 {small}"
    groups = f"{asked} --groups 1/1"
    first = run(f"{groups} --json")
    assert first.exit_code == 0, first.stderr
    (kept,) = (tmp_path / "cache" / "profiles").iterdir()
    said = json.loads(first.stdout)
    (chosen,) = said["chosen"]
    assert chosen["policy"] == "waa_c" and chosen["fits"] and said["devices"].startswith("1/1 cpu")
    assert 1 <= chosen["encode_batch"] <= chosen["decode_batch"] <= 4
    assert {"B_D - 1", "B_D + 1"} & set(chosen["neighbours"])
    for name, other in chosen["neighbours"].items():
        step = {"B_D": "decode_batch", "B_E": "encode_batch"}[name[:3]]
        assert other[step] == chosen[step] + (1 if "+" in name else -1)
    again = run(f"{groups} --profile {kept} --policies waa")
    assert again.exit_code == 0, again.stderr
    assert "WAA-C" in again.stdout and "N_D " in again.stdout and "B_D" in again.stdout
    for more, code, text in (
        ("--policies rra", 2, "pass some of ('waa',)"),
        ("--tensor-parallel 2", 2, "--groups says how each group is split"),
        ("--groups 1/3/5", 2, "1/3/5"),
        ("-b 1e-9", 1, "InfeasibleBoundError"),
    ):
        assert_refused(run(f"{groups} {more}"), text, code)
    assert_refused(run(f"{asked} --profile {kept}"), "does not hold step times", 1)


def test_lengths_must_fit_the_engine(token_model, tmp_path, monkeypatch):
    """Lengths beyond the context are refused before step times are measured."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    done = run(f"plan --model {token_model} --task S {SMALL}")
    assert_refused(done, "do not fit in a context of 32")
    assert not (tmp_path / "cache" / "profiles").exists()


@pytest.mark.release
def test_devices_are_planned_by_measured_layers(token_model, lengths, tmp_path, monkeypatch):
    """A file of measured layers gives schedules on devices; one of other sizes is refused."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    asked = f"plan --model {token_model} --lengths {lengths} --layers --num-bounds 3"
    small = "--max-slots 2 --max-context 32 --quiet --json"
    assert_refused(run(f"{asked} --devices 9 {small}"), "--devices 9 is not allowed")
    config = replace(config_from_hf(TOKEN_CONFIG), dtype="float32")
    sizes = replace(LayerSizes.of(config, max_length=32), max_batch=2)
    origin = LayerOrigin.of(config, jax.devices(), sizes)
    timer = MadeUpTimer((1, 2, 4), sizes=sizes)
    own = tmp_path / "layers.json"
    measure_layers(timer, LayerProfile(origin, path=own), progress=False)
    done = run(f"{asked} --devices 4 --profile {own} {small}")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["devices"].startswith("4 ") and said["devices"].endswith("by layers")
    assert sum(devices for devices, _, _ in said["chosen"][0]["stages"]) == 4
    kept = layers_path(token_model, origin)
    kept.parent.mkdir(parents=True)
    own.rename(kept)
    assert json.loads(run(f"{asked} --devices 4 {small}").stdout) == said
    other = run(f"{asked} --profile {kept} --max-slots 3 --quiet")
    assert_refused(other, "sizes.max_batch is 2, not 3", 1)
    assert "InvalidProfileError" in other.stderr
