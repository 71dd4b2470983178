"""jaxserve as the rollout engine of Tunix, Google's library for post-training in JAX.

`TunixModel` gives a decoder of jaxserve the call that Tunix trains, and `JaxserveRollout` is a
rollout engine for it (`tunix.rl.rollout.base_rollout.BaseRollout` of google-tunix 0.1.7):

    actor = TunixModel(decoder)
    cluster = RLCluster(
        actor=actor,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            rollout_engine=functools.partial(JaxserveRollout, deterministic=True), ...
        ),
    )
    GRPOLearner(rl_cluster=cluster, reward_fns=[reward], algo_config=GRPOConfig(...)).train(data)

The runtime serves the arrays of the model that Tunix trains. Nothing is copied where the trainer
and the runtime use the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxserve import Runtime, SamplingParams
from jaxserve.models.decoder import Decoder


@final
class TunixModel(nnx.Module):
    """A decoder with the call of Tunix's models, which pad prompts at their beginning."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def __call__(
        self,
        tokens: Int32[Array, "sequences length"],
        positions: Int32[Array, "sequences length"],
        cache: None,
        attention_mask: Bool[Array, "sequences length length"],
    ) -> tuple[Float32[Array, "sequences length vocab"], None]:
        """Return the logits; those of padding mean nothing.

        The decoder takes padding at the end only, so each sequence is rotated to its first token
        and its logits are rotated back. `positions` follow from that.
        """
        places = jnp.arange(tokens.shape[1])
        start = jnp.argmax(attention_mask[:, -1], axis=-1, keepdims=True).astype(jnp.int32)
        rotated = jnp.take_along_axis(tokens, (places + start) % tokens.shape[1], axis=1)
        logits = self.decoder.whole_logits(rotated)
        back = (places - start) % tokens.shape[1]
        return jnp.take_along_axis(logits, back[:, :, None], axis=1), None


@final
class JaxserveRollout(BaseRollout):
    """A rollout engine of Tunix that samples with a `Runtime`.

    The runtime takes the model's parameters of the moment when it generates, so that it follows a
    trainer that changes the model in place. `RLCluster` creates the engine with these arguments.

    Args:
      rollout_actor: the model that Tunix trains.
      tokenizer: any that Tunix takes.
      rollout_config: its `kv_cache_size` bounds a sequence, and its temperature is that of
        `get_per_token_logps`.
      mesh: of Tunix; the runtime's own is an option.
      options: of `Runtime`, such as `deterministic` and `max_slots`.
    """

    def __init__(
        self,
        *,
        rollout_actor: TunixModel,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: Any = None,
        **options: Any,
    ):
        self._model = rollout_actor
        is_adapted = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapted else TokenizerAdapter(tokenizer)
        self._temperature = rollout_config.temperature
        self._num_requests = 0
        longest = rollout_actor.decoder.config.max_position_embeddings
        options.setdefault("max_context", min(rollout_config.kv_cache_size, longest))
        options.setdefault("progress", False)
        params = nnx.state(rollout_actor.decoder, nnx.Param)
        self._served = jax.tree.leaves(params)
        self.runtime = Runtime(rollout_actor.decoder, params, **options)

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Return one sampled answer to each prompt, with the end token where it came to it.

        Equal prompts get different answers. `logprobs` are those of the distribution that tokens
        were drawn from, after temperature and truncation.

        Raises:
          ValueError: a prompt is longer than `max_prompt_length`.
        """
        self._follow_model()
        config = rollout_config
        sequences = [self._tokens(prompt, config.max_prompt_length) for prompt in prompts]
        done = self.runtime.generate(sequences, self._sampling(config, len(prompts)))
        for each in done:
            if each.error is not None:
                raise each.error
        pad, width = self.pad_id(), config.max_prompt_length
        logprobs = [
            np.array([token.processed_logprob for token in each.logprobs or ()], np.float32)
            for each in done
        ]
        return RolloutOutput(
            text=[self._tokenizer.decode(list(each.token_ids)) for each in done],
            logits=None,  # as Tunix's engine for vLLM
            tokens=[np.array(each.token_ids, np.int32) for each in done],
            left_padded_prompt_tokens=np.array(
                [[pad] * (width - len(each)) + each for each in sequences], np.int32
            ),
            logprobs=logprobs if config.return_logprobs else None,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: Int32[Array, "sequences prompt"],
        completion_tokens: Int32[Array, "sequences completion"],
        completion_mask: Any = None,
    ) -> Float32[Array, "sequences completion"]:
        """Return the log-probabilities of completions at the temperature of rollouts; 0 at padding.

        They have the bits that sampling reported where the runtime is deterministic and nothing was
        truncated.

        Args:
          completion_mask: which tokens belong to the completions. Without it, they are those before
            the padding; and one more, which may be the end of the answer, where the end token is
            the padding, too.
        """
        self._follow_model()
        pad = self.pad_id()
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        prompts = [row[np.argmax(row != pad) :].tolist() for row in prompts]
        is_valid = completions != pad
        if completion_mask is not None:
            is_valid = np.asarray(completion_mask).astype(np.bool_)
        lengths = [int(np.max(np.flatnonzero(row), initial=-1)) + 1 for row in is_valid]
        if completion_mask is None and self.eos_id() == pad:
            lengths = [min(length + 1, completions.shape[1]) for length in lengths]
        rows = [
            [*prompt, *row[:length].tolist()]
            for prompt, row, length in zip(prompts, completions, lengths, strict=True)
        ]
        drawn = SamplingParams(temperature=self._temperature) if self._temperature > 0 else None
        logps = np.zeros(completions.shape, np.float32)
        for row, scores, length in zip(
            logps, self.runtime.score(rows, drawn), lengths, strict=True
        ):
            row[:length] = scores[len(scores) - length :]
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give the model these parameters, with which the next answers are generated.

        Raises:
          NotImplementedError: they are parameters of Tunix's LoRA.
        """
        if filter_types is not None and nnx.Param not in filter_types:
            raise NotImplementedError(
                f"filter_types={filter_types} is not allowed; train all parameters, or give the "
                "runtime adapters with load_adapter"
            )
        nnx.update(self._model, params)

    def pad_id(self) -> int:
        """Return the token of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends an answer."""
        return self._tokenizer.eos_id()

    def model(self) -> TunixModel:
        """Return the model whose parameters are served."""
        return self._model

    def close(self) -> None:
        """End the runtime's threads."""
        self.runtime.close()

    def _follow_model(self) -> None:
        """Serve the model's present parameters."""
        params = nnx.state(self._model.decoder, nnx.Param)
        leaves = jax.tree.leaves(params)
        if any(new is not old for new, old in zip(leaves, self._served, strict=True)):
            self.runtime.update_params(params)
            self._served = leaves

    def _tokens(self, prompt: str, most: int) -> list[int]:
        """Return a prompt as Tunix's own sampler tokenizes it, with one start token in front."""
        tokens = list(self._tokenizer.encode(prompt))
        if self._tokenizer.bos_id():
            tokens = list(self._tokenizer.dedup_bos_ids([self._tokenizer.bos_id(), *tokens]))
        if len(tokens) > most:
            raise ValueError(
                f"a prompt has {len(tokens)} tokens and max_prompt_length is {most}; pass a larger "
                "max_prompt_length, or shorter prompts"
            )
        return tokens

    def _sampling(self, config: RolloutConfig, count: int) -> list[SamplingParams]:
        """Return parameters for each of the next requests, with seeds of their own."""
        if config.seed is None:
            first = self._num_requests
            self._num_requests += count
        else:
            first = int(np.asarray(config.seed).reshape(-1)[-1])
        ends: Sequence[int] = config.eos_tokens or [self.eos_id()]
        return [
            SamplingParams(
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=max(0, config.top_k or 0),  # -1 stands for all tokens, too
                max_tokens=config.max_tokens_to_generate,
                stop_token_ids=tuple(ends),
                seed=first + i,
                logprobs=0 if config.return_logprobs else None,
            )
            for i in range(count)
        ]
