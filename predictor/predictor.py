"""The predictor: from prompts to distributions of output lengths, and to reservations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tokenizers
from flax import nnx

from predictor.buckets import LengthBuckets
from predictor.calibration import Calibration, softmax
from predictor.data import PromptEncoder, padded
from predictor.distribution import LengthDistributions
from predictor.encoder import EncoderConfig, LengthClassifier
from predictor.weights import config_of, load_encoder

DESCRIPTION, TOKENIZER, PARAMS = "predictor.json", "tokenizer.json", "params"
MAX_TOKENS = 256
# Prompts that are computed together; fewer are padded to the next of these.
_BATCHES = (1, 8, 64)


@final
class LengthPredictor:
    """Predicts how many tokens an answer will have.

    Attributes:
      model: see `LengthClassifier`.
      calibration: None until it was calibrated.
    """

    def __init__(
        self,
        config: EncoderConfig,
        model: LengthClassifier,
        buckets: LengthBuckets,
        tokenizer: tokenizers.Tokenizer,
        *,
        max_tokens: int = MAX_TOKENS,
        calibration: Calibration | None = None,
    ):
        self.config = config
        self.model = model
        self.buckets = buckets
        self.calibration = calibration
        self._tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer, min(max_tokens, config.max_positions))
        self._logits = jax.jit(_logits, static_argnums=0)

    @classmethod
    def from_encoder(
        cls,
        folder: str | Path,
        buckets: LengthBuckets,
        *,
        seed: int = 0,
        max_tokens: int = MAX_TOKENS,
    ) -> LengthPredictor:
        """Around a pre-trained encoder of a Hugging Face folder, its head still to be trained.

        Raises:
          ValueError: see `load_encoder`.
        """
        folder = Path(folder)
        config = config_of(folder)
        model = LengthClassifier.random(config, buckets.num, seed=seed)
        load_encoder(model.encoder, folder)
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        return cls(config, model, buckets, tokenizer, max_tokens=max_tokens)

    def logits(self, prompts: Sequence[str]) -> np.ndarray:
        """float32 [prompts, buckets], before calibration."""
        tokens = self.encoder.tokens(prompts)
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        out = np.zeros((len(prompts), self.buckets.num), np.float32)
        self.model.eval()
        graphdef, state = nnx.split(self.model)
        for start in range(0, len(order), _BATCHES[-1]):
            some = order[start : start + _BATCHES[-1]]
            size = next(size for size in _BATCHES if len(some) <= size)
            ids, mask = padded([tokens[i] for i in some], size)
            out[some] = np.asarray(self._logits(graphdef, state, ids, mask))[: len(some)]
        return out

    def predict(self, prompts: Sequence[str]) -> LengthDistributions:
        """The distribution of each prompt's output length, calibrated if it was."""
        temperature = 1.0 if self.calibration is None else self.calibration.temperature
        return LengthDistributions(self.buckets, softmax(self.logits(prompts) / temperature))

    def calibrate(self, prompts: Sequence[str], lengths: Sequence[int]) -> Calibration:
        """Learn the temperature and the promises from prompts that were held out of training."""
        fitted = Calibration.fit(self.buckets, self.logits(prompts), np.asarray(lengths))
        self.calibration = fitted
        return fitted

    def reserve(self, prompt: str, *, miss_rate: float = 0.1) -> int:
        """A length that at most `miss_rate` of requests outgrow.

        Raises:
          ValueError: it was not calibrated.
        """
        if self.calibration is None:
            raise ValueError(
                "the predictor is not calibrated; call calibrate() on held-out requests"
            )
        level = self.calibration.level(miss_rate)
        return int(self.predict([prompt]).quantile(level)[0])

    def save(self, folder: str | Path) -> None:
        """Write everything that `load` needs; a folder that is there is replaced."""
        folder = Path(folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / PARAMS, nnx.to_pure_dict(self._params()), force=True)
        self._tokenizer.save(str(folder / TOKENIZER))
        calibration = None
        if self.calibration is not None:
            levels = self.calibration.levels.tolist()
            calibration = {"temperature": self.calibration.temperature, "levels": levels}
        description = {
            "config": asdict(self.config),
            "edges": self.buckets.edges,
            "max_tokens": self.encoder.max_tokens,
            "calibration": calibration,
        }
        (folder / DESCRIPTION).write_text(json.dumps(description) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> LengthPredictor:
        """What `save` wrote.

        Raises:
          ValueError: there is no predictor.
        """
        folder = Path(folder).absolute()
        if not (folder / DESCRIPTION).is_file():
            raise ValueError(
                f"{folder} holds no predictor; train one with `jaxserve predictor train`"
            )
        given = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        config, buckets = EncoderConfig(**given["config"]), LengthBuckets(tuple(given["edges"]))
        calibration = given["calibration"]
        predictor = cls(
            config,
            LengthClassifier.random(config, buckets.num),
            buckets,
            tokenizers.Tokenizer.from_file(str(folder / TOKENIZER)),
            max_tokens=given["max_tokens"],
            calibration=calibration
            and Calibration(calibration["temperature"], np.asarray(calibration["levels"])),
        )
        state = predictor._params()
        with ocp.StandardCheckpointer() as checkpointer:
            nnx.replace_by_pure_dict(
                state, checkpointer.restore(folder / PARAMS, nnx.to_pure_dict(state))
            )
        nnx.update(predictor.model, state)
        return predictor

    def _params(self) -> nnx.State:
        return nnx.state(self.model, nnx.Param)


def _logits(
    graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array, mask: jax.Array
) -> jax.Array:
    return nnx.merge(graphdef, state)(tokens, mask).astype(jnp.float32)
