"""The length predictor, from prompts to distributions of output lengths and to reservations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp
import tokenizers
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int
from tqdm import tqdm

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.calibration import Calibration, softmax
from jaxserve.predictor.data import TOKEN_BUCKETS, PromptEncoder, padded, width_of
from jaxserve.predictor.distribution import LengthDistributions
from jaxserve.predictor.encoder import (
    EncoderConfig,
    LengthClassifier,
    config_of,
    load_encoder,
    mean_pooled,
)

DESCRIPTION, TOKENIZER, PARAMS = "predictor.json", "tokenizer.json", "params"
MAX_TOKENS = 256
# Batch sizes; a smaller batch is padded to the next of these.
_BATCHES = (1, 8, 64)

# Nested dictionaries of float32 arrays, as `nnx.to_pure_dict` returns them.
Params = dict[str, Any]


@final
@dataclass(frozen=True)
class _Serving:
    """The serving parameters and calibration; immutable, and replaced as a whole."""

    params: Params
    calibration: Calibration | None


@final
class LengthPredictor:
    """A predictor of an answer's number of tokens. Thread-safe.

    Args:
      model: its parameters are taken; the module itself is not kept.
      max_tokens: prompts with more tokens lose their middle.
      calibration: the calibration of these parameters, if there is one.
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
        self.buckets = buckets
        self._tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer, min(max_tokens, config.max_positions))
        model.eval()
        self._graphdef, self._state, self._rest = nnx.split(model, nnx.Param, ...)
        self._serving = _Serving(nnx.to_pure_dict(self._state), calibration)
        self._logits, self._embeddings = jax.jit(self.apply), jax.jit(self._pooled)

    @classmethod
    def from_encoder(
        cls,
        folder: str | Path,
        buckets: LengthBuckets,
        *,
        seed: int = 0,
        max_tokens: int = MAX_TOKENS,
    ) -> LengthPredictor:
        """Make a predictor with a Hugging Face folder's encoder and an untrained head.

        Raises:
          ValueError: the folder has no tokenizer.json, or `load_encoder` fails.
        """
        folder = Path(folder)
        config = config_of(folder)
        model = LengthClassifier.random(config, buckets.num, seed=seed)
        load_encoder(model.encoder, folder)
        return cls(config, model, buckets, read_tokenizer(folder), max_tokens=max_tokens)

    @property
    def params(self) -> Params:
        """The serving parameters, which are never changed in place."""
        return self._serving.params

    @property
    def calibration(self) -> Calibration | None:
        """The serving parameters' calibration; None without one."""
        return self._serving.calibration

    def adopt(self, params: Params, calibration: Calibration | None) -> None:
        """Serve with these from the next prediction on. The change is atomic for all threads."""
        self._serving = _Serving(params, calibration)

    def module(self) -> LengthClassifier:
        """Return a new module with the serving parameters, which the caller may change."""
        return self._merged(self.params)

    def apply(
        self, params: Params, tokens: Int[Array, "texts tokens"], mask: Bool[Array, "texts tokens"]
    ) -> Float32[Array, "texts buckets"]:
        """Return logits without dropout; a pure function, for `jax.jit`.

        Args:
          params: the function is differentiable in these.
          mask: False for padding.
        """
        return self._merged(params)(tokens, mask)

    def logits(self, prompts: Sequence[str]) -> Float32[np.ndarray, "prompts buckets"]:
        """Return logits before calibration."""
        return self.logits_of(self.encoder.tokens(prompts))

    def logits_of(
        self, tokens: Sequence[np.ndarray], params: Params | None = None
    ) -> Float32[np.ndarray, "texts buckets"]:
        """Return logits of tokenized texts before calibration.

        Args:
          tokens: token ids from `encoder`.
          params: by default the serving parameters.
        """
        params = self.params if params is None else params
        return _in_batches(lambda *batch: self._logits(params, *batch), tokens, self.buckets.num)

    def embeddings(
        self, prompts: Sequence[str], params: Params | None = None
    ) -> Float32[np.ndarray, "prompts hidden_size"]:
        """Return the encoder's hidden states, averaged over tokens.

        Args:
          params: by default the serving parameters.
        """
        tokens, params = self.encoder.tokens(prompts), self.params if params is None else params
        width = self.config.hidden_size
        return _in_batches(lambda *batch: self._embeddings(params, *batch), tokens, width)

    def warm_up(self, *, progress: bool = True) -> None:
        """Compile for every batch size and padded prompt length, so that no prediction compiles."""
        widths = sorted({width_of(min(w, self.encoder.max_tokens)) for w in TOKEN_BUCKETS})
        shapes = [(size, width) for size in _BATCHES for width in widths]
        bar = tqdm(shapes, desc="compiling predictor", leave=False, delay=2, disable=not progress)
        for size, width in bar:
            one = np.zeros(min(width, self.encoder.max_tokens), np.int32)
            self.logits_of([one] * size)

    def predict(self, prompts: Sequence[str]) -> LengthDistributions:
        """Return the distribution of each prompt's output length, calibrated if possible."""
        return self._predict(self._serving, prompts)

    def calibrate(self, prompts: Sequence[str], lengths: Sequence[int] | np.ndarray) -> Calibration:
        """Fit a calibration to held-out prompts and their output lengths, adopt and return it."""
        fitted = Calibration.fit(self.buckets, self.logits(prompts), np.asarray(lengths))
        self.adopt(self.params, fitted)
        return fitted

    def reserve(self, prompt: str, *, miss_rate: float = 0.1) -> int:
        """Return a length in tokens that at most a share `miss_rate` of requests outgrows.

        Raises:
          ValueError: the predictor is not calibrated.
        """
        serving = self._serving
        if serving.calibration is None:
            raise ValueError(
                "the predictor is not calibrated; call calibrate() on held-out requests"
            )
        level = serving.calibration.level(miss_rate)
        return int(self._predict(serving, [prompt]).quantile(level)[0])

    def save(self, folder: str | Path) -> None:
        """Write everything that `load` needs, and overwrite a predictor in the folder."""
        folder, serving = Path(folder).absolute(), self._serving
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / PARAMS, serving.params, force=True)
        self._tokenizer.save(str(folder / TOKENIZER))
        calibration = None
        if serving.calibration is not None:
            levels = serving.calibration.levels.tolist()
            calibration = {"temperature": serving.calibration.temperature, "levels": levels}
        description = {
            "config": asdict(self.config),
            "edges": self.buckets.edges,
            "max_tokens": self.encoder.max_tokens,
            "calibration": calibration,
        }
        (folder / DESCRIPTION).write_text(json.dumps(description) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> LengthPredictor:
        """Load what `save` wrote; raises ValueError without a predictor in the folder."""
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
            LengthClassifier.blank(config, buckets.num),
            buckets,
            read_tokenizer(folder),
            max_tokens=given["max_tokens"],
        )
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(folder / PARAMS, predictor.params)
        predictor.adopt(
            params,
            calibration
            and Calibration(calibration["temperature"], np.asarray(calibration["levels"])),
        )
        return predictor

    def _predict(self, serving: _Serving, prompts: Sequence[str]) -> LengthDistributions:
        temperature = 1.0 if serving.calibration is None else serving.calibration.temperature
        logits = self.logits_of(self.encoder.tokens(prompts), serving.params)
        return LengthDistributions(self.buckets, softmax(logits / temperature))

    def _merged(self, params: Params) -> LengthClassifier:
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graphdef, state, self._rest, copy=True)

    def _pooled(
        self, params: Params, tokens: Int[Array, "texts tokens"], mask: Bool[Array, "texts tokens"]
    ) -> Float32[Array, "texts hidden_size"]:
        return mean_pooled(self._merged(params).encoder(tokens, mask), mask)


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read a folder's tokenizer.json; raises ValueError if it is missing or cannot be read."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{folder} has no {TOKENIZER}; pass a folder with a fast tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare exceptions
        raise ValueError(f"{path} cannot be read: {error}") from error


def _in_batches(
    compute: Callable[..., jax.Array], tokens: Sequence[np.ndarray], width: int
) -> Float32[np.ndarray, "texts width"]:
    order = np.argsort([len(ids) for ids in tokens], kind="stable")
    out = np.zeros((len(tokens), width), np.float32)
    for start in range(0, len(order), _BATCHES[-1]):
        some = order[start : start + _BATCHES[-1]]
        size = next(size for size in _BATCHES if len(some) <= size)
        ids, mask = padded([tokens[i] for i in some], size)
        out[some] = np.asarray(compute(ids, mask))[: len(some)]
    return out
