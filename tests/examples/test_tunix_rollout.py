"""The rollout engine for Tunix, driven by Tunix itself where it is installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples import grpo
from jaxserve.testing import OPTIONS, WrapAll, tiny_llama

tunix = pytest.importorskip("tunix", reason="google-tunix is not installed; pip install it")

from tunix.rl import common  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402

from examples.tunix_rollout import JaxserveRollout, TunixModel  # noqa: E402

pytestmark = pytest.mark.release

PAD = len(grpo.SYMBOLS)
CONFIG = RolloutConfig(
    max_tokens_to_generate=6,
    max_prompt_length=8,
    kv_cache_size=64,
    temperature=0.8,
    return_logprobs=True,
)
PROMPTS = ["1+2=", "11+12=", "1+2="]


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return grpo.encode(text)

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(33 + token) for token in ids)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return grpo.END

    def pad_id(self) -> int:
        return PAD


@pytest.fixture(autouse=True)
def standard_promotion():
    """Tunix and Optax do not support the strict promotion of the other tests."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.fixture(scope="module")
def rollout():
    """An engine around a tiny model."""
    engine = JaxserveRollout(
        rollout_actor=TunixModel(tiny_llama()),
        tokenizer=Letters(),
        rollout_config=CONFIG,
        deterministic=True,
        **OPTIONS,
    )
    yield engine
    engine.close()


def padded(rollout: JaxserveRollout, tokens: list[np.ndarray]) -> np.ndarray:
    rows = [[*row, *[rollout.pad_id()] * (6 - len(row))] for row in tokens]
    return np.array(rows, np.int32)


def test_answers_have_the_form_that_tunix_wants(rollout):
    """Prompts are padded at their beginning, and equal prompts get different answers."""
    output = rollout.generate(PROMPTS, CONFIG)
    pads = [int(np.sum(row == PAD)) for row in output.left_padded_prompt_tokens]
    assert pads == [4, 2, 4] and output.left_padded_prompt_tokens.shape == (3, 8)
    assert not np.array_equal(output.tokens[0], output.tokens[2])
    for text, tokens, logprobs in zip(output.text, output.tokens, output.logprobs, strict=True):
        assert 0 < len(tokens) == len(logprobs) == len(text) <= 6
        assert grpo.END not in tokens[:-1]
    with pytest.raises(ValueError, match="max_prompt_length is 8"):
        rollout.generate(["1234+1234="], CONFIG)
    with pytest.raises(NotImplementedError, match="filter_types"):
        rollout.update_params({}, (nnx.LoRAParam,))


def test_log_probabilities_are_those_of_sampling_and_of_tunix(rollout):
    """`get_per_token_logps` has the bits of sampling, and Tunix's own function agrees with it."""
    output = rollout.generate(PROMPTS, CONFIG)
    completions = padded(rollout, output.tokens)
    scores = np.asarray(rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions))
    theirs = common.compute_per_token_logps(
        *nnx.split(rollout.model()),
        prompt_tokens=jnp.asarray(output.left_padded_prompt_tokens),
        completion_tokens=jnp.asarray(completions),
        pad_id=rollout.pad_id(),
        eos_id=rollout.eos_id(),
        temperature=CONFIG.temperature,
    )
    for row, own, logprobs in zip(np.asarray(theirs), scores, output.logprobs, strict=True):
        length = len(logprobs)
        np.testing.assert_array_equal(own[:length], logprobs)
        assert np.all(own[length:] == 0)
        np.testing.assert_allclose(row[:length], own[:length], rtol=1e-4, atol=1e-5)


class _OneTokenForBoth(Letters):
    """Padding is the end token, as with Llama 3."""

    def pad_id(self) -> int:
        return grpo.END


def test_an_end_token_that_is_the_padding_too_has_its_log_probability():
    """Without a mask the first one after the answer counts; with a mask that decides."""
    engine = JaxserveRollout(
        rollout_actor=TunixModel(tiny_llama()),
        tokenizer=_OneTokenForBoth(),
        rollout_config=CONFIG,
        deterministic=True,
        **OPTIONS,
    )
    prompts = np.array([[grpo.END, *grpo.encode("1+2=")]], np.int32)
    completions = np.array([[*grpo.encode("3"), grpo.END, grpo.END, grpo.END]], np.int32)
    scores = np.asarray(engine.get_per_token_logps(prompts, completions))[0]
    assert (scores[:2] < 0).all() and (scores[2:] == 0).all()
    mask = np.array([[1, 1, 0, 0]])
    masked = np.asarray(engine.get_per_token_logps(prompts, completions, mask))[0]
    np.testing.assert_array_equal(masked, scores)
    engine.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_tunix_trains_with_it():
    """Tunix's learner samples with the weights that it has trained, and they are its own arrays."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    actor = TunixModel(tiny_llama())
    nnx.update(actor, jax.device_put(nnx.state(actor), jax.NamedSharding(mesh, jax.P())))
    before = jax.tree.map(np.asarray, nnx.state(actor))
    seen: list[Any] = []
    wrapped = WrapAll()
    options = {"deterministic": True, "wrap_executor": wrapped, **OPTIONS}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.append(cluster.rollout.runtime.weights_version)
        return [float(len(text) < 6) for text in completions]

    cluster = RLCluster(
        actor=actor,
        tokenizer=Letters(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh),
            rollout_engine=partial(JaxserveRollout, **options),
            rollout_config=CONFIG,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2),
                eval_every_n_steps=100,
                max_steps=3,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=[reward],
        algo_config=GRPOConfig(num_generations=4, num_iterations=1, beta=0.0),
    )
    learner.train([{"prompts": np.array(["1+2=", "3+4="])}] * 3)
    rollout = cluster.rollout
    assert seen == [0, 1, 2]
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, nnx.state(actor))
    assert all(jax.tree.leaves(changed))
    rollout.generate(PROMPTS, CONFIG)
    assert rollout.runtime.weights_version == 3
    served, trained = wrapped.executors[0].params, nnx.state(actor.decoder, nnx.Param)
    for own, theirs in zip(jax.tree.leaves(served), jax.tree.leaves(trained), strict=True):
        assert own.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
    rollout.close()
