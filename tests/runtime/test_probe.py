"""A runtime with a probe reads what a forward pass reads, and has the same tokens."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.activations import read_along
from jaxserve.predictor import LengthBuckets, LengthProbe, ProbeConfig, Refinement
from jaxserve.predictor.probe import ProbeHead
from jaxserve.sharding import StagePlan, make_mesh
from jaxserve.testing import ExecutorWrapper, RecordingExecutor, WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from jaxserve.workload.answers import FinishedAnswer
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.runtime.serving import weights

BUCKETS = LengthBuckets.logarithmic(64, 6)
REFINEMENT = Refinement(buckets=BUCKETS, marginal=np.full(BUCKETS.num, 1 / BUCKETS.num), interval=4)
PROMPTS = random_prompts(16, longest=20)
PARAMS = [SamplingParams(max_tokens=None, forced_length=3 + 5 * (i % 7)) for i in range(16)]
# The pool holds about two of the longest requests at the same time.
# Without a warm-up, since executables with a probe are made for each runtime.
MEMORY = {"kv_memory": 12 * 2 * 2 * 2 * 8 * 8 * 4, **OPTIONS}


def made_up_probe(**config) -> LengthProbe:
    """Return an untrained probe."""
    config = ProbeConfig(**{"layer": 1, "width": 32, "hidden_size": 8, **config})
    return LengthProbe(config, ProbeHead(config, BUCKETS.num, rngs=nnx.Rngs(3)), REFINEMENT)


class Fixed:
    """A probe with constant readings, or with those of a function of reading and activations."""

    layer, width, refinement = 1, 32, REFINEMENT

    def __init__(self, logits, compute=None):
        self.params = np.asarray(logits, np.float32)
        self._compute = compute

    def apply(self, params, activations, /):
        if self._compute is not None:
            return self._compute(activations)
        return jnp.broadcast_to(params, (activations.shape[0], *params.shape))


WRONG = {
    "short": Fixed([50.0, 0, 0, 0, 0, 0]),
    "long": Fixed([0, 0, 0, 0, 0, 50.0]),
    "undecided": Fixed([0.0] * 6),
    "not numbers": Fixed([np.nan] * 6),
    "infinite": Fixed([np.inf, 0, 0, 0, 0, -np.inf]),
    "untrained": made_up_probe(),
}


@pytest.fixture(scope="module")
def expected():
    """Every prompt's answer alone, without a probe and with enough memory."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        return [rt.generate(p, params).token_ids for p, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.release
@pytest.mark.parametrize("name", some(WRONG))
def test_wrong_readings_cost_time_and_never_tokens(expected, name):
    """Readings are short, long, undecided or NaN; nothing compiles after a warm-up."""
    warm = {"warmup": "full", "strict": True} if name == "untrained" else {}
    with Runtime(tiny_llama(), probe=WRONG[name], **MEMORY | warm) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        stats = rt.stats()
    assert [each.token_ids for each in done] == expected
    assert not warm or stats.num_compilations == 0
    assert (stats.num_refined > len(PROMPTS)) == (name not in ("not numbers", "infinite"))


@pytest.mark.release
def test_with_a_probe_alone_s3_does_not_reserve_for_the_longest_answer(expected, caplog):
    """More answers run at once than fit at full length, with the same tokens and no warning."""
    with Runtime(tiny_llama(), probe=WRONG["short"], **{**MEMORY, "policy": "s3"}) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        most = max(step.num_running for step in rt.report().steps)
    assert [each.token_ids for each in done] == expected
    assert most > 3 and "reserves for the longest answer" not in caplog.text


def _readings(executor: RecordingExecutor) -> dict[tuple[str, int], np.ndarray]:
    """Return the readings of each request at each number of output tokens before its newest one."""
    read, serving = {}, {}
    for plan, result in zip(executor.plans, executor.results, strict=True):
        for source, target in plan.moves:
            serving[target] = serving.pop(source)
        for new in plan.admissions:
            serving[new.slot] = [new.request, len(new.tokens) - len(new.request.prompt)]
        for index, row in enumerate(plan.rows):
            serving[row.slot][1] += int(result.num_tokens[index])
            request, num_tokens = serving[row.slot]
            # A reading after an answer's end has no meaning.
            if result.num_tokens[index] and num_tokens < request.params.forced_length:
                read[request.id, num_tokens - 1] = result.remaining[index]
    return read


@pytest.mark.parametrize("layout, layer", some([("unrolled", 1), ("scanned", 2)]))
def test_it_reads_what_a_forward_pass_does(layout, layer):
    """This holds in prefill chunks, mixed steps and decode loops, at middle and last layers."""
    model, probe = tiny_llama(layer_layout=layout), made_up_probe(layer=layer)
    seen = WrapAll(RecordingExecutor)
    with Runtime(model, probe=probe, wrap_executor=seen, **MEMORY) as rt:
        prompts = random_prompts(9, seed=1)
        done = rt.generate(prompts, [replace(p, temperature=0.8, seed=1) for p in PARAMS[:9]])
    read = _readings(seen.executors[0])
    answers = [FinishedAnswer(prompt=c.prompt_token_ids, output=c.token_ids) for c in done]
    whole = read_along(model, answers, layer=layer, interval=1, progress=False)
    ids = [c.request_id for c in done]
    at = [(ids[i], t) for i, t in zip(whole.answer.tolist(), whole.elapsed.tolist(), strict=True)]
    assert set(read) <= set(at) and len(read) > len(at) / 8
    wanted = dict(zip(at, probe.logits(whole.activations), strict=True))
    got, wanted = (np.stack([each[key] for key in read]) for each in (read, wanted))
    assert_close(got, wanted, 1e-4)


@pytest.mark.release
def test_over_a_mesh_it_reads_the_same(expected):
    mesh = make_mesh(tensor=2)
    with Runtime(tiny_llama(), mesh=mesh, probe=made_up_probe(), **OPTIONS) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        assert rt.stats().num_refined > len(PROMPTS)
    assert [each.token_ids for each in done] == expected


class _Misread(ExecutorWrapper):
    """A probe that declares readings of one bucket although they have six."""

    refinement = replace(REFINEMENT, buckets=LengthBuckets((0, 5)), marginal=np.ones(1))


@pytest.mark.release
def test_readings_that_cannot_be_used_are_reported_once(expected, caplog):
    probe = made_up_probe()
    with (
        Runtime(tiny_llama(), probe=probe, wrap_executor=_Misread, **MEMORY) as rt,
        caplog.at_level(logging.ERROR),
    ):
        done = rt.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in done] == expected
    assert caplog.text.count("the probe's readings cannot be used") == 1


def _raises(activations):
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    "probe, said",
    [
        (made_up_probe(width=31), "width 31"),
        (made_up_probe(layer=3), "behind layer 3"),
        (Fixed([], _raises), "no idea"),
        (Fixed([0.0, 0.0]), r"\(1, 2\)"),
        ("/nowhere", "holds no probe"),
        (5, "probe=5"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused(probe, said):
    """The error comes before the compilation, and says what does not fit."""
    with pytest.raises(InvalidConfigError, match=said):
        Runtime(tiny_llama(), probe=probe, **OPTIONS)


def test_stages_are_refused():
    """The runtime does not serve without the probe instead."""
    with pytest.raises(InvalidConfigError, match="stages"):
        Runtime(tiny_llama(), mesh=StagePlan.of([1, 1]), probe=made_up_probe(), **OPTIONS)


@pytest.mark.release
def test_a_saved_probe_is_loaded(tmp_path, expected):
    """It is loaded from its folder; restarted answers have their first estimate again."""
    made_up_probe().save(tmp_path)
    with Runtime(tiny_llama(), probe=tmp_path, **MEMORY) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        rt.update_params(weights(), running="restart")
        again = rt.generate(PROMPTS[:2], PARAMS[:2])
    assert [each.token_ids for each in done] == expected
    assert [each.token_ids for each in again] == expected[:2]
