"""Runtimes of models with recurrent layers give the answers of PyTorch transformers."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError
from jaxserve.execution.sizes import nbytes
from jaxserve.memory.disk_tier import file_bytes
from jaxserve.models.batch import empty_cache
from jaxserve.models.store import load_model
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.sharding import StagePlan, make_groups, make_mesh
from jaxserve.steps.step_function import Placement
from jaxserve.testing import OPTIONS, ExecutorWrapper, RecordingExecutor, WrapAll, tiny_llama
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.memory.gate import spoil
from tests.models.hf_checkpoints import VOCAB_SIZE, greedy_shortfall, torch_logits, write_checkpoint
from tests.runtime.serving import CHECKPOINT

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
_RNG = np.random.default_rng(5)
# More prompts than slots; some are longer than a step.
PROMPTS = [_RNG.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 9, 100, 30, 2, 70, 5)]
LENGTHS = [12, 3, 12, 1, 7, 12, 5]
EACH = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in LENGTHS]


@pytest.fixture(scope="module", params=some(["bamba", "mamba2"]))
def checkpoint(request, tmp_path_factory):
    """A folder with a model, and its greedy answers to PROMPTS, which PyTorch's logits confirm."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder)
    with Runtime.from_pretrained(str(folder), policy="orca", **CHECKPOINT) as rt:
        answers = [rt.generate(prompt, PARAMS) for prompt in PROMPTS]
    wanted = [list(answer.token_ids) for answer in answers]
    for prompt, answer in zip(PROMPTS, wanted, strict=True):
        assert len(answer) == 12 and greedy_shortfall(model, prompt, answer) == 0
    assert len({token for answer in wanted for token in answer}) > 10
    return str(folder), wanted


@pytest.fixture(scope="module")
def bamba(tmp_path_factory):
    """The folder of a model with both kinds of layers."""
    folder = tmp_path_factory.mktemp("bamba")
    write_checkpoint("bamba", folder)
    return str(folder)


@pytest.fixture(scope="module")
def bamba_answers(bamba) -> list[list[int]]:
    """Its answers to PROMPTS with pages enough."""
    with Runtime.from_pretrained(bamba, policy="orca", **CHECKPOINT) as rt:
        return _tokens(rt.generate(PROMPTS, PARAMS))


def _one_state(folder: Path) -> Any:
    """Return the shapes of a state with its page."""
    config = load_model(folder, dtype="float32", progress=False).config
    return jax.eval_shape(lambda: empty_cache(config, 1, 8, "float32", "unrolled", num_slots=1))


def _tokens(answers) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


def _cut(wanted: list[list[int]]) -> list[list[int]]:
    return [answer[:length] for answer, length in zip(wanted, LENGTHS, strict=True)]


@pytest.mark.release
@pytest.mark.parametrize(
    "policy",
    some(
        [
            *("auto", "orca", "vllm_like", "fastertransformer", "concurrent_instances", "flover"),
            *("s3", "pensieve", "pensieve_device_only", "exegpt_rra", "triton_window"),
        ]
    ),
)
def test_every_policy_gives_the_same_answers(checkpoint, policy):
    """Chunks of prompts beside decoding, answers that end apart, and repeated prompts."""
    folder, wanted = checkpoint
    with Runtime.from_pretrained(folder, policy=policy, state_memory=0, **CHECKPOINT) as rt:
        assert _tokens(rt.generate(PROMPTS, EACH)) == _cut(wanted)
        assert _tokens(rt.generate(PROMPTS[:3], PARAMS)) == wanted[:3]
        assert rt.stats().num_prefix_hit == 0
        assert rt.residency(PROMPTS[2]) == ["nowhere"] * 12
        rt.check_integrity()


def test_nothing_compiles_after_the_warm_up(checkpoint):
    """Steps, moves of slots, and copies of states to the host are prepared before any request."""
    folder, wanted = checkpoint
    memory = dict(state_memory=nbytes(_one_state(Path(folder))), host_memory="1MB")
    options = dict(warmup=True, strict=True, **memory)
    with Runtime.from_pretrained(folder, **CHECKPOINT | options) as rt:
        assert _tokens(rt.generate(PROMPTS, EACH)) == _cut(wanted)
        turns = [[*PROMPTS[i], *wanted[i][:n], 7] for i, n in enumerate(LENGTHS)]
        rt.generate(turns, PARAMS)
        stats = rt.stats()
        assert min(stats.num_snapshots_out, stats.num_snapshots_in) > 0


@pytest.mark.release
def test_states_move_with_their_slots(checkpoint):
    """Sequences that are left go on in other slots when their neighbours end."""
    folder, wanted = checkpoint
    recording = WrapAll(RecordingExecutor)
    order = [1, 4, 6, 0, 4, 6, 0, 3]  # of PROMPTS, one for each slot
    lengths = [12, *[2] * 6, 12]
    each = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    options = CHECKPOINT | dict(wrap_executor=recording, policy="orca", max_slots=8)
    with Runtime.from_pretrained(folder, **options) as rt:
        got = _tokens(rt.generate([PROMPTS[i] for i in order], each))
    assert got == [wanted[i][:n] for i, n in zip(order, lengths, strict=True)]
    assert any(plan.moves for plan in recording.executors[0].plans)


@pytest.mark.release
def test_a_step_has_several_pieces_of_a_prompt(tmp_path):
    """A long and a short prompt in one step: answers and prompt log-probabilities are PyTorch's."""
    model = write_checkpoint("bamba", tmp_path)
    long = np.random.default_rng(1).integers(0, VOCAB_SIZE, 150)
    prompts = [long.tolist(), long[:20].tolist()]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0)
    recording = WrapAll(RecordingExecutor)
    options = CHECKPOINT | dict(max_step_tokens=192, max_context=200, wrap_executor=recording)
    with Runtime.from_pretrained(str(tmp_path), policy="orca", **options) as rt:
        answers = rt.generate(prompts, params)
    rows = [row for plan in recording.executors[0].plans for row in plan.rows]
    assert max(row.num_tokens for row in rows) == 150
    for prompt, answer in zip(prompts, answers, strict=True):
        assert greedy_shortfall(model, prompt, answer.token_ids) == 0
        scores = torch_logits(model, np.asarray(prompt))[:-1]
        scores -= np.logaddexp.reduce(scores, axis=-1, keepdims=True)
        wanted = scores[np.arange(len(prompt) - 1), prompt[1:]]
        got = np.array([entry.logprob for entry in answer.prompt_logprobs[1:]])
        assert_close(got, wanted, 1e-4)


@pytest.mark.release
def test_samples_are_those_of_as_many_requests(checkpoint):
    """Samples of one prompt compute it each, since its pages are not all that they need."""
    folder, _ = checkpoint
    many = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=4, ignore_eos=True)
    with Runtime.from_pretrained(folder, **CHECKPOINT) as rt:
        together = rt.generate([PROMPTS[3]], many)[0]
        again = rt.generate([PROMPTS[3], *PROMPTS], many)[0]
    assert together.samples == again.samples
    assert len({sample.token_ids for sample in together.samples}) > 1


def test_a_prompt_continues_from_a_state(bamba):
    """Log-probabilities have the bits of computing all tokens in the same chunks."""
    prompt, scored = PROMPTS[2][:48], replace(PARAMS, logprobs=0)
    found = {}
    for memory in (0, "1MB"):
        with Runtime.from_pretrained(bamba, state_memory=memory, **CHECKPOINT) as rt:
            rt.generate(prompt[:32], replace(PARAMS, max_tokens=1))  # two chunks, as in `prompt`
            answer = rt.generate(prompt, scored)
            found[memory] = [each.logprob for each in answer.logprobs]
            assert answer.num_cached_tokens == (0 if memory == 0 else 32)
            rt.check_integrity()
    assert found[0] == found["1MB"]


@pytest.mark.release
@pytest.mark.parametrize(("num_states", "num_on_host"), [(8, 0), (1, 6), (2, 40)])
@pytest.mark.parametrize("name", ["bamba", "mamba2", "qwen3_5", "lfm2", "falcon_h1_norm"])
def test_conversations_with_and_without_snapshots(name, num_states, num_on_host, tmp_path):
    """Greedy tokens agree over forks, evictions and preemptions, with states on the host or not."""
    write_checkpoint(name, tmp_path)
    one = _one_state(tmp_path)
    host_bytes = num_on_host * nbytes(one) * (1 if name == "mamba2" else 2)
    small: dict[str, Any] = dict(state_memory=num_states * nbytes(one), host_memory=host_bytes)
    if name != "mamba2":
        small["kv_memory"] = 24 * nbytes(one.pages)
    with (
        Runtime.from_pretrained(str(tmp_path), state_memory=0, **CHECKPOINT) as whole,
        Runtime.from_pretrained(str(tmp_path), policy="pensieve", **small, **CHECKPOINT) as rt,
    ):
        rng, histories = np.random.default_rng(0), [[1]]
        for step in range(120):
            new = rng.integers(0, VOCAB_SIZE, rng.integers(1, 30)).tolist()
            histories = [*(each for each in histories[-40:] if len(each) < 100), new]
            prompts = [
                [*histories[i], *rng.integers(0, VOCAB_SIZE, rng.integers(1, 9)).tolist()]
                for i in rng.integers(0, len(histories), 5)
            ]
            each = [replace(PARAMS, max_tokens=int(n)) for n in rng.integers(1, 18, 5)]
            answers = _tokens(rt.generate(prompts, each))
            assert answers == _tokens(whole.generate(prompts, each)), step
            histories += [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
            rt.check_integrity()
        stats = rt.stats()
        assert stats.num_snapshots_restored > 50
        assert stats.num_preemptions > 0 or name == "mamba2"
        if num_on_host:
            assert min(stats.num_snapshots_out, stats.num_snapshots_in) > 50
            assert stats.num_pages_in > 50 or name == "mamba2"


class _DearCopies(ExecutorWrapper):
    """Has costs by which a page should be computed again rather than copied."""

    swap_costs = SwapCosts(page_s=1.0, token_s=1e-3)


@pytest.mark.release
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_later_run_finds_states_on_the_disk(checkpoint, num_stages, tmp_path):
    """Turns continue from states of an earlier runtime; their tokens are those without a disk."""
    folder, wanted = checkpoint
    num = json.loads((Path(folder) / "config.json").read_text())["num_hidden_layers"]
    mesh = None if num_stages == 1 else StagePlan.of([1] * num)
    on_disk: dict[str, Any] = dict(disk_memory="4MB", disk_folder=tmp_path, host_memory="1MB")
    on_disk["wrap_executor"] = _DearCopies
    with Runtime.from_pretrained(folder, mesh=mesh, **on_disk, **CHECKPOINT) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
    turns = [[*prompt, *answer, 7] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    with Runtime.from_pretrained(folder, policy="orca", **CHECKPOINT) as rt:
        second = _tokens(rt.generate(turns, PARAMS))
    with Runtime.from_pretrained(folder, mesh=mesh, **on_disk, **CHECKPOINT) as rt:
        answers = [rt.generate(turn, PARAMS) for turn in turns]
        assert _tokens(answers) == second
        cached = [each.num_cached_tokens for each in answers]
        assert cached == [len(turn) - 2 for turn in turns]
        assert rt.stats().num_pages_from_disk > 0
        rt.check_integrity()
    spoil(tmp_path / "0", random.Random(0))
    with Runtime.from_pretrained(folder, mesh=mesh, **on_disk, **CHECKPOINT) as rt:
        assert _tokens(rt.generate(turns, PARAMS)) == second
        rt.check_integrity()


@pytest.mark.release
def test_a_disk_that_holds_no_state_is_refused(bamba, tmp_path):
    """The error says how much does."""
    with pytest.raises(InvalidConfigError, match="does not hold one page, or state") as refused:
        Runtime.from_pretrained(bamba, disk_memory=2000, disk_folder=tmp_path, **CHECKPOINT)
    least = re.search(r"pass at least ([\d,]+)", str(refused.value))
    assert least is not None
    assert int(least[1].replace(",", "")) == file_bytes(nbytes(_one_state(Path(bamba))))


@pytest.mark.release
def test_a_sleep_drops_states_of_the_host(bamba, bamba_answers):
    """The next turn is computed as a whole, and continues from states again after that."""
    memory = dict(state_memory=nbytes(_one_state(Path(bamba))), policy="pensieve")
    with Runtime.from_pretrained(bamba, **memory, **CHECKPOINT) as rt:
        for _ in range(2):
            assert _tokens(rt.generate(PROMPTS, PARAMS)) == bamba_answers
            before = rt.stats()
            assert before.num_snapshots_out > 0
            rt.sleep()
            rt.wake_up()
            assert _tokens(rt.generate(PROMPTS[:1], PARAMS)) == bamba_answers[:1]
            assert rt.stats().num_snapshots_restored == before.num_snapshots_restored
            rt.check_integrity()


@pytest.mark.parametrize("policy", some(["vllm_like", "pensieve", "auto"]))
def test_preempted_sequences_are_computed_again(bamba, bamba_answers, policy):
    """With too few pages, sequences begin anew, and answers stay the same; nothing is swapped."""
    memory = dict(kv_memory="20kB", host_memory=0)
    with Runtime.from_pretrained(bamba, policy=policy, **memory, **CHECKPOINT) as rt:
        assert _tokens(rt.generate(PROMPTS * 2, PARAMS)) == bamba_answers * 2
        stats = rt.stats()
        assert stats.num_preemptions > 0 or policy == "auto"
        assert stats.num_pages_out == stats.num_pages_in == 0
        rt.check_integrity()


@pytest.mark.release
def test_a_pool_of_pages_is_resized(bamba):
    """States stay as they are when pages move; a model without pages has nothing to resize."""
    with Runtime.from_pretrained(bamba, **CHECKPOINT) as rt:
        wanted = _tokens(rt.generate(PROMPTS, PARAMS))
        rt.resize_kv("20kB")
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted


@pytest.mark.release
def test_a_model_without_attention_has_no_pool_to_resize(tmp_path):
    """A size of the pool is refused, at construction and later; a sleep frees nothing of it."""
    write_checkpoint("mamba2", tmp_path)
    with pytest.raises(InvalidConfigError, match="kv_memory='1MB'.*no keys and values"):
        Runtime.from_pretrained(str(tmp_path), kv_memory="1MB", **CHECKPOINT)
    with pytest.raises(InvalidConfigError, match="kv_dtype='int8'.*no keys and values"):
        Runtime.from_pretrained(str(tmp_path), kv_dtype="int8", **CHECKPOINT)
    with Runtime.from_pretrained(str(tmp_path), **CHECKPOINT) as rt:
        with pytest.raises(InvalidConfigError, match="no keys and values"):
            rt.resize_kv("1MB")
        wanted = rt.generate(PROMPTS[1], PARAMS).token_ids
        rt.sleep()
        rt.wake_up()
        assert rt.generate(PROMPTS[1], PARAMS).token_ids == wanted


@pytest.mark.release
def test_states_that_do_not_fit_are_named(bamba, tmp_path):
    """The error at construction asks for fewer slots, before anything is compiled."""
    config = json.loads((Path(bamba) / "config.json").read_text())
    large = json.dumps(config | {"mamba_d_state": 1 << 14})  # 768 GiB in all slots
    (tmp_path / "config.json").write_text(large)
    many = dict(max_slots=1 << 16, max_step_tokens=1 << 16, load="random")
    with pytest.raises(DeviceMemoryError, match="states in slots do not fit.*lower max_slots"):
        Runtime.from_pretrained(tmp_path, **CHECKPOINT | many)


@pytest.mark.parametrize(
    ("options", "mesh", "message"),
    [
        (dict(policy="exegpt_waa_c"), lambda: make_groups(encode=1, decode=1), "2 device groups"),
        (dict(host_memory="1MB", state_memory=0), lambda: None, "host_memory.*state_memory=0"),
        (dict(disk_memory="1MB", state_memory=0), lambda: None, "disk_memory.*state_memory=0"),
        (dict(restore="per_layer"), lambda: None, "restore"),
    ],
)
def test_what_states_cannot_have_is_refused(bamba, options, mesh, message):
    with pytest.raises(InvalidConfigError, match=f"{message}.*recurrent layers.*omit"):
        Runtime.from_pretrained(bamba, mesh=mesh(), **options, **CHECKPOINT)


def test_a_model_without_states_keeps_none():
    with pytest.raises(InvalidConfigError, match="state_memory='1MB'.*without recurrent.*omit"):
        Runtime(tiny_llama(), state_memory="1MB", **OPTIONS)


def test_on_two_shards(bamba, bamba_answers):
    """Each shard has half of the projections and memories; a second turn begins with a state.

    It comes from the host, with the parts of both shards.
    """
    mesh = make_mesh(tensor=2)
    params = nnx.to_pure_dict(load_model(bamba, mesh=mesh, progress=False).params)
    mixer = params["blocks"][0]["mixer"]
    split = [mixer[name].sharding.spec for name in ("project", "out")]
    assert split == [P(None, "tensor"), P("tensor", None)]
    config = load_model(bamba, progress=False).config
    places = Placement.like(NamedSharding(mesh, P())).cache(config).states
    assert [places[name].spec for name in ("window", "memory")] == [P(), P(None, None, "tensor")]
    memory = nbytes(_one_state(Path(bamba)))
    with Runtime.from_pretrained(bamba, mesh=mesh, state_memory=memory, **CHECKPOINT) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == bamba_answers
        turn = [*PROMPTS[2], *bamba_answers[2], 7]
        second = _tokens(rt.generate([turn], PARAMS))
        assert rt.stats().num_snapshots_in > 0
    with Runtime.from_pretrained(bamba, policy="orca", **CHECKPOINT) as rt:
        assert second == _tokens(rt.generate([turn], PARAMS))


@pytest.mark.release
@pytest.mark.parametrize("cut", ["last", "first", "each"])
def test_on_stages(checkpoint, cut):
    """Also those without attention, and those without states; turns begin with a state of each.

    Some come from the host, where each stage has its part.
    """
    folder, wanted = checkpoint
    num = json.loads((Path(folder) / "config.json").read_text())["num_hidden_layers"]
    layers = {"last": [num - 1, 1], "first": [1, num - 1], "each": [1] * num}[cut]
    options: dict[str, Any] = dict(warmup=True, strict=True) if cut == "last" else {}
    options |= dict(state_memory=nbytes(_one_state(Path(folder))), host_memory="1MB")
    with Runtime.from_pretrained(folder, mesh=StagePlan.of(layers), **CHECKPOINT | options) as rt:
        assert _tokens(rt.generate(PROMPTS, EACH)) == _cut(wanted)
        turns = [[*PROMPTS[i], *wanted[i][:n], 7] for i, n in enumerate(LENGTHS)]
        second = _tokens(rt.generate(turns, PARAMS))
        assert rt.stats().num_snapshots_in > 0
        if cut == "each" and "bamba" in folder:  # of which one stage has pages
            rt.resize_kv("20kB")
            assert _tokens(rt.generate(PROMPTS, EACH)) == _cut(wanted)
        rt.check_integrity()
    with Runtime.from_pretrained(folder, policy="orca", **CHECKPOINT) as rt:
        assert second == _tokens(rt.generate(turns, PARAMS))


@pytest.mark.release
@pytest.mark.parametrize("options", [dict(quantize="int8"), dict(policy="s3"), dict(max_slots=3)])
def test_options_on_two_shards(bamba, options):
    """Quantised projections are split, too; slots that move bring their part of the states."""
    given = CHECKPOINT | options
    with Runtime.from_pretrained(bamba, **given) as rt:
        wanted = _tokens(rt.generate(PROMPTS, EACH))
    with Runtime.from_pretrained(bamba, mesh=make_mesh(tensor=2), **given) as rt:
        assert _tokens(rt.generate(PROMPTS, EACH)) == wanted
        rt.check_integrity()


@pytest.mark.release
def test_a_trainers_mesh_splits_sequences_and_channels(bamba):
    """Logits of whole sequences are one device's; only channels are gathered, no sequences."""
    tokens = jax.numpy.asarray([PROMPTS[2][:24], PROMPTS[2][24:48]], "int32")
    mesh, alone = make_mesh(data=2, tensor=2), load_model(bamba, progress=False)
    model = load_model(bamba, mesh=mesh, progress=False)

    @jax.jit
    def logits(params, tokens):
        return nnx.merge(model.graphdef, params).whole_logits(tokens)

    with jax.set_mesh(mesh):
        split = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        gathers = re.findall(r"f32\[(\d+),\S+ all-gather\(", _compiled(logits, model.params, split))
        got = logits(model.params, split)
    assert gathers and set(gathers) <= {"24", "1"}  # tokens of a shard, of 48
    wanted = nnx.merge(alone.graphdef, alone.params).whole_logits(tokens)
    assert_close(np.asarray(got), np.asarray(wanted), 1e-4)


def _compiled(function, *arguments) -> str:
    return function.lower(*arguments).compile().as_text()


@pytest.mark.release
def test_replicas_quantised_weights_and_new_weights(bamba):
    """What does not touch states works as for other models."""
    dense = load_model(bamba, dtype="float32", progress=False).params
    eight_bits = dict(quantize="int8", kv_dtype="int8")
    with Runtime.from_pretrained(bamba, mesh=make_mesh(data=2), **eight_bits, **CHECKPOINT) as rt:
        alone = _tokens([rt.generate(prompt, PARAMS) for prompt in PROMPTS])
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == alone
        rt.update_params(dense)
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == alone
