"""Runtimes of encoder-decoder models give the answers of PyTorch transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    EmptyPromptError,
    InfeasibleBoundError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    PromptTooLongError,
    UnsupportedModelError,
)
from jaxserve.models.store import load_model
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import make_groups, make_mesh
from jaxserve.testing import OPTIONS as TINY
from jaxserve.testing import FreeCopiesExecutor, tiny_llama
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.common.waiting import until
from tests.models.t5_checkpoints import (
    VARIANTS,
    greedy,
    random_prompts,
    torch_encoded,
    torch_logits,
    write_checkpoint,
)
from tests.runtime.serving import CHECKPOINT

OPTIONS = CHECKPOINT | dict(max_step_tokens=64)
WARM = OPTIONS | dict(warmup=True, strict=True)
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = random_prompts(7)
# Presets that need two groups of devices.
ON_GROUPS = ("exegpt_waa_c", "exegpt_waa_m")


@pytest.fixture(scope="module", params=some(VARIANTS))
def checkpoint(request, tmp_path_factory):
    """A folder, and PyTorch's model of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), write_checkpoint(request.param, folder)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A folder with a T5 of version 1.0, and PyTorch's greedy answers to PROMPTS."""
    folder = tmp_path_factory.mktemp("t5")
    model = write_checkpoint("t5", folder)
    return str(folder), [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_answers_and_logprobs_are_those_of_pytorch(checkpoint):
    """Prompts of all lengths in one batch have PyTorch's greedy tokens and log-probabilities."""
    folder, model = checkpoint
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        answers = rt.generate(PROMPTS, params)
    start = model.config.decoder_start_token_id
    distinct = set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.error is None
        assert list(answer.prompt_token_ids) == prompt
        assert list(answer.token_ids) == greedy(model, prompt, 12)
        distinct |= {*answer.token_ids}
        logits = torch_logits(model, prompt, [start, *answer.token_ids[:-1]])
        wanted = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        got = [each.logprob for each in answer.logprobs]
        np.testing.assert_allclose(got, wanted[np.arange(12), answer.token_ids], atol=5e-4)
    assert len(distinct) > 10  # answers that differ can show differences


def test_encoder_outputs_are_those_of_pytorch(checkpoint):
    """`encode` gives the encoder's last hidden states of ragged prompts, alone and in a batch."""
    folder, model = checkpoint
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        together = rt.encode(PROMPTS)
        alone = rt.encode(PROMPTS[0])
        assert rt.encode([]) == []
    np.testing.assert_allclose(alone, together[0], atol=1e-5)
    for prompt, got in zip(PROMPTS, together, strict=True):
        wanted = torch_encoded(model, prompt)
        assert got.dtype == np.float32
        assert_close(got, wanted, 1e-4)


def _tokens(answers) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


@pytest.mark.release
@pytest.mark.parametrize("policy", some(sorted(PRESETS.keys() - {"exegpt", *ON_GROUPS})))
def test_every_policy_gives_the_same_answers(t5, policy):
    """Prompts of which one alone may fill a step are scheduled whole, and nothing is compiled."""
    folder, wanted = t5
    with Runtime.from_pretrained(folder, policy=policy, **WARM) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()


@pytest.mark.release
def test_the_policy_exegpt_plans_by_itself(t5, tmp_path, monkeypatch):
    """It measures step times at its start, and plans after 64 answers; tokens stay."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    folder, wanted = t5
    with Runtime.from_pretrained(folder, policy="exegpt", latency_bound=50.0, **WARM) as rt:
        assert _tokens(rt.generate(PROMPTS * 10, PARAMS)) == wanted * 10
        until(lambda: rt.stats().plan is not None, 60)
        plan = rt.stats().plan
        assert plan.keeps_bounds and plan.num_lengths >= 64
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()


@pytest.mark.release
def test_a_plan_under_a_latency_bound_is_carried_out(t5):
    """From measured step times, the encoder's among them; tokens stay, and nothing is compiled."""
    folder, wanted = t5
    lengths = [(len(prompt), 12) for prompt in PROMPTS]
    with Runtime.from_pretrained(folder, policy="auto", **WARM) as rt:
        times = rt.measure_step_times(rounds=1)
        assert set(times.encode_s) == set(rt.config.token_buckets)
        with pytest.raises(InfeasibleBoundError) as refused:
            rt.plan(1e-6, lengths=lengths)
        plan = rt.plan(1.2 * refused.value.lowest["latency_s"], lengths=lengths)
        assert plan.keeps_bounds and plan.answers_per_s > 0
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.stats().plan is not None
        rt.check_integrity()


@pytest.mark.release
def test_preempted_answers_are_computed_again(t5):
    """With a pool that is too small, prompts are encoded again, and answers stay the same."""
    folder, wanted = t5
    with Runtime.from_pretrained(folder, policy="vllm_like", kv_memory="130kB", **OPTIONS) as rt:
        assert _tokens(rt.generate(PROMPTS * 2, PARAMS)) == wanted * 2
        assert rt.stats().num_preemptions > 0
        rt.check_integrity()


@pytest.mark.release
def test_swapped_pages_come_back(t5):
    """Pages of both kinds go to the host and come back."""
    folder, wanted = t5
    options = OPTIONS | dict(policy="pensieve", kv_memory="130kB", host_memory="4MB")
    with Runtime.from_pretrained(folder, **options) as rt:
        for _ in range(3):
            assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.stats().num_pages_out > 0 and rt.stats().num_pages_in > 0
        rt.check_integrity()


@pytest.mark.release
def test_pages_of_a_whole_prompt_are_found_again(t5):
    """A repeated prompt is not encoded again; one that only begins alike is."""
    folder, _ = t5
    prompt = [*range(2, 40), 1]  # 39 tokens in five pages
    longer = [*prompt, 5]
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        first = rt.generate([prompt], PARAMS)
        assert rt.stats().num_prefix_hit == 0
        assert rt.residency(prompt) == ["device"] * 5
        assert rt.residency(longer) == ["nowhere"] * 5
        computed = rt.stats().num_tokens
        again = rt.generate([prompt], PARAMS)
        assert rt.stats().num_prefix_hit == 40
        assert rt.stats().num_tokens - computed < len(prompt)
        other = rt.generate([longer], PARAMS)
        assert rt.stats().num_prefix_hit == 40
        rt.forget_kept_pages()
        assert _tokens(rt.generate([longer], PARAMS)) == _tokens(other)
    assert _tokens(first) == _tokens(again)


@pytest.mark.release
def test_a_disk_tier_keeps_prompts_for_the_next_runtime(t5, tmp_path):
    """Another runtime of the same weights finds encoded prompts on the disk."""
    folder, wanted = t5
    disk = dict(disk_memory="4MB", disk_folder=str(tmp_path), host_memory="1MB")
    disk["wrap_executor"] = FreeCopiesExecutor
    for is_second in (False, True):
        with Runtime.from_pretrained(folder, **disk, **OPTIONS) as rt:
            assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
            assert (rt.stats().num_prefix_hit_on_disk > 0) == is_second


@pytest.mark.release
def test_samples_share_their_prompt(t5):
    """Several samples of one prompt are those of as many requests."""
    folder, _ = t5
    many = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=4, ignore_eos=True)
    with Runtime.from_pretrained(folder, policy="orca", **OPTIONS) as rt:
        together = rt.generate([PROMPTS[0]], many)[0]
        again = rt.generate([PROMPTS[0]] + PROMPTS, many)[0]
    assert together.samples == again.samples
    assert len({sample.token_ids for sample in together.samples}) > 1


@pytest.mark.release
@pytest.mark.parametrize("mesh", some([dict(tensor=2), dict(stage=2), dict(stage=2, tensor=2)]))
def test_meshes_have_the_answers_of_one_device(t5, mesh):
    """Heads are split over devices, and the decoder's layers over stages."""
    folder, wanted = t5
    devices = make_mesh(**mesh)
    options = WARM if mesh == dict(stage=2) else OPTIONS
    with Runtime.from_pretrained(
        folder, mesh=devices, policy="vllm_like", kv_memory="80kB", **options
    ) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.encode(PROMPTS)[1].shape == (len(PROMPTS[1]), 48)
        rt.check_integrity()


@pytest.mark.release
def test_scanned_layers_have_the_same_answers(t5):
    """Encoder and decoder layers that are stacked, over one cache buffer, change nothing."""
    folder, wanted = t5
    loaded = load_model(folder, layer_layout="scanned")
    model = nnx.merge(loaded.graphdef, loaded.params)
    options = {name: value for name, value in OPTIONS.items() if name != "dtype"}
    with Runtime(model, eos_token_ids=[1], **options) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted


@pytest.mark.release
@pytest.mark.parametrize("options", [dict(dtype="bfloat16"), dict(dtype="float16")])
def test_half_precision_is_close(t5, options):
    """Half precision changes the encoder's output by little, and answers are finite."""
    folder, _ = t5
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        wanted = rt.encode(PROMPTS[0])
    with Runtime.from_pretrained(folder, **(OPTIONS | options)) as rt:
        got = rt.encode(PROMPTS[0])
        answers = rt.generate(PROMPTS, PARAMS)
    assert_close(got, wanted, 0.1)
    assert all(answer.finish_reason == "length" for answer in answers)


def test_penalties_count_the_answer_alone(t5):
    """Tokens of the encoder's prompt are not penalized; those of the answer are."""
    folder, wanted = t5
    free = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, repetition_penalty=100)
    first = wanted[0][0]
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        answer = rt.generate([PROMPTS[0]], free)[0]
        with_it = rt.generate([[first, *PROMPTS[0]]], PARAMS)[0].token_ids[0]
        penalized = rt.generate([[first, *PROMPTS[0]]], free)[0].token_ids[0]
    assert len(set(answer.token_ids)) == 12
    assert answer.token_ids[0] == first and penalized == with_it


def test_bad_requests_are_refused_alone(t5):
    """What an encoder-decoder model cannot serve is a typed error that says why."""
    folder, wanted = t5
    scored = SamplingParams(max_tokens=2, prompt_logprobs=1)
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        assert rt.config.max_prompt_tokens == 64
        assert rt.max_length == rt.config.max_context > 65
        answers = rt.generate([[], [5] * 65, PROMPTS[0]], PARAMS)
        assert isinstance(answers[0].error, EmptyPromptError)
        assert isinstance(answers[1].error, PromptTooLongError)
        assert "max_step_tokens" in str(answers[1].error)
        assert list(answers[2].token_ids) == wanted[0]
        with pytest.raises(InvalidSamplingParamsError, match="predicts no tokens"):
            rt.submit(PROMPTS[0], scored)
        for prompts in ([[]], [[5] * 65], [[500]], "text without a tokenizer"):
            with pytest.raises(InvalidRequestError):
                rt.encode(prompts)
        with pytest.raises(InvalidRequestError):
            rt.submit([{"role": "user", "content": "hi"}])


def test_a_model_without_an_encoder_encodes_nothing():
    """`encode` of a decoder-only model says what it is for."""
    with Runtime(tiny_llama(), **TINY) as rt:
        with pytest.raises(UnsupportedModelError, match="no encoder"):
            rt.encode([[1, 2]])


@pytest.mark.release
def test_device_groups_have_the_answers_of_one_device(t5):
    """One group encodes, and hands the pages of prompts over to the group that decodes.

    A plan for both groups under a bound, from their measured step times, changes no token.
    """
    folder, wanted = t5
    groups = make_groups(encode=1, decode=2)
    lengths = [(len(prompt), 12) for prompt in PROMPTS]
    # Few slots, since steps of every number of them are compiled and measured.
    options = OPTIONS | dict(max_slots=2, strict=True, mesh=groups, policy="exegpt_waa_c")
    with Runtime.from_pretrained(folder, **options) as rt:
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.encode(PROMPTS)[1].shape == (len(PROMPTS[1]), 48)
        times = rt.measure_group_times(rounds=1)
        assert set(times.groups[0].encode_s) == set(rt.config.token_buckets)
        with pytest.raises(InfeasibleBoundError) as refused:
            rt.plan(1e-6, lengths=lengths)
        plan = rt.plan(1.2 * refused.value.lowest["latency_s"], lengths=lengths)
        assert plan.family == "waa" and plan.keeps_bounds
        assert _tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()
