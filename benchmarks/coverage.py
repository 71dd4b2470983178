"""Which architectures of transformers load here and agree: `python -m benchmarks.coverage`.

It needs PyTorch and transformers (the extra `test`).
Of every text architecture that generates, a tiny random checkpoint is loaded here:

- `agrees`: the prompt's logits in float32 are within 1e-4 (relative norm) of those of transformers,
  and every greedy token is the likeliest one there.
- `refused`: loading raises UnsupportedModelError, whose message names what is missing.
- `disagrees`, `fails`: anything else, which is a defect.

The architectures are those of transformers' classes for causal language models, except decoders
that are parts of encoder-decoder models, encoders with a head and models that draft for another
one, and the text models of its models of images and text that have no class of their own.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from tqdm import tqdm

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, option, reason
from jaxserve.core.errors import InvalidConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_ERROR = 1e-4
# Closer logits may have either order.
_ROUNDING = 1e-3
_VOCAB_SIZE = 101
_NUM_PROMPT, _NUM_ANSWER = 37, 8
# Architectures that one process checks, so that its memory stays bounded.
_PER_PROCESS = 24

# Values of the fields that a configuration has. Sizes are no powers of two.
_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size",), _VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 80),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 6),
    **dict.fromkeys(("attention_heads",), 6),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 20),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 7),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id"), 0),
    **dict(q_lora_rank=20, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12),
    **dict(mamba_n_heads=6, mamba_d_head=16, mamba_d_state=10, mamba_n_groups=2, mamba_d_ssm=96),
    **dict(mamba_chunk_size=8, first_k_dense_replace=1),
    "head_dim": 16,
    "layer_types": None,
}
_TOWER = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48)
_ROTATION = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
# Further fields, by `model_type`, where the sizes above do not make a model.
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite"), dict(num_key_value_heads=6, head_dim=8)),
    "deepseek_v3": dict(num_key_value_heads=6, head_dim=8, n_group=2, topk_group=1),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "codegen": dict(n_head=4, rotary_dim=4),
    "dots1": dict(n_shared_experts=1),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "helium": dict(head_dim=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "vaultgemma": dict(query_pre_attn_scalar=24),
    "falcon": dict(new_decoder_architecture=True),
    "gemma2": dict(query_pre_attn_scalar=24),
    "gemma3_text": dict(query_pre_attn_scalar=24),
    "gptj": dict(rotary_dim=4),
    "mamba2": dict(num_heads=6, head_dim=16, n_groups=3, state_size=10, chunk_size=8),
    "opt": dict(word_embed_proj_dim=48),
    "qwen2_vl": dict(vision_config=dict(depth=1, embed_dim=16, hidden_size=48, num_heads=2)),
    "qwen2_vl_text": dict(rope_parameters=_ROTATION),
    "qwen2_5_vl": dict(vision_config=_TOWER | dict(fullatt_block_indexes=[0])),
    "qwen2_5_vl_text": dict(rope_parameters=_ROTATION),
    "qwen3_vl": dict(vision_config=_TOWER | dict(deepstack_visual_indexes=[0])),
    "qwen3_vl_text": dict(rope_parameters=_ROTATION | dict(mrope_interleaved=True)),
}

Outcome = Literal["agrees", "refused", "disagrees", "fails"]
OUTCOMES: tuple[Outcome, ...] = ("agrees", "refused", "disagrees", "fails")


@final
@dataclass(frozen=True)
class Architecture:
    """A text model of transformers.

    `wrapper` is the `model_type` that its class has, if that is a model of images and text.
    """

    kind: str
    class_name: str
    wrapper: str | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found for one architecture.

    Attributes:
      error: the relative error of the prompt's logits; None if nothing was computed.
      shortfall: by how much a greedy token's logit is below the highest one in transformers.
      nearest: the family that reads most of the fields, if none has this `model_type`.
      unread: the fields that it does not read.
    """

    class_name: str
    outcome: Outcome
    family: str | None = None
    error: float | None = None
    shortfall: float | None = None
    reason: str | None = None
    nearest: str | None = None
    unread: Sequence[str] = ()


def run(options: argparse.Namespace) -> dict[str, Any]:
    wanted = [each for each in architectures() if not options.only or each.kind in options.only]
    if unknown := set(options.only) - {each.kind for each in wanted}:
        raise InvalidConfigError(
            f"--only {' '.join(sorted(unknown))} names no text architecture of transformers; give "
            "the model_type of its text model"
        )
    found: dict[str, Row] = {}
    with tqdm(total=len(wanted), desc="coverage", unit="model", delay=2, leave=False) as bar:
        for architecture, row in _checked(wanted):
            found[architecture.kind] = row
            bar.update()
            if row.outcome in ("disagrees", "fails"):
                print(f"{architecture.kind}: {row}", file=sys.stderr)
    counts = Counter(row.outcome for row in found.values())
    return {
        "repeats": 1,
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "architectures": {kind: asdict(row) for kind, row in sorted(found.items())},
        **environment.describe("torch"),
    }


def architectures() -> list[Architecture]:
    """Return the text architectures of the installed transformers."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    causal, wrapped = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    found: dict[str, Architecture] = {}
    for kind, name in {**wrapped, **causal}.items():
        if kind.endswith("_assistant"):
            continue
        with warnings.catch_warnings(action="ignore"):
            config = transformers.CONFIG_MAPPING[kind]()
        text = config.text_config if "text_config" in config.sub_configs else config
        own = text.model_type if text is not config else kind
        # Two decoders have the field of encoders, and are causal without it.
        is_encoder = not getattr(config, "is_decoder", True) and "gpt_neox" not in kind
        if is_encoder or config.is_encoder_decoder or (text is not config and own in causal):
            continue
        # Of several wrappers, the one that is named like the text model, or the first.
        if own not in found or own == f"{kind}_text":
            found[own] = Architecture(own, name, None if text is config else kind)
    return sorted(found.values(), key=lambda each: each.kind)


def _checked(wanted: Sequence[Architecture]) -> Iterator[tuple[Architecture, Row]]:
    """Yield what is found for each, from processes whose end costs one architecture."""
    pool = _pool()
    try:
        for architecture in wanted:
            try:
                row = pool.submit(check, architecture).result()
            except BrokenProcessPool as error:
                row = Row(class_name=architecture.class_name, outcome="fails", reason=reason(error))
                pool = _pool()
            yield architecture, row
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, get_context("spawn"), initializer=_prepare, max_tasks_per_child=_PER_PROCESS
    )


def _prepare() -> None:
    """Set up a process: it says nothing, and compiles fast, which takes most of its time."""
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def check(architecture: Architecture) -> Row:
    """Return what is found for one architecture; no error of its own is raised."""
    import transformers

    from jaxserve.models.families import FAMILIES, config_from_hf, family_of, nearest_family

    row: dict[str, Any] = dict(class_name=architecture.class_name)
    try:
        kind = architecture.wrapper or architecture.kind
        if architecture.kind not in FAMILIES:
            given = transformers.CONFIG_MAPPING[kind]().to_dict()
            nearest, unread = nearest_family(given.get("text_config") or given)
            row |= dict(nearest=nearest, unread=unread)
            config_from_hf(given)
        family = family_of(config_from_hf(_tiny_config(architecture).to_dict()))
        row["family"] = next(iter(family.fields))
        with TemporaryDirectory() as folder:
            config = _tiny_config(architecture)
            model = _write(config, Path(folder), is_wrapped=architecture.wrapper is not None)
            error, shortfall = _compare(model, Path(folder))
    except UnsupportedModelError as error:
        return Row(**row, outcome="refused", reason=reason(error))
    except Exception as error:  # of transformers or of ours; the next architecture goes on
        return Row(**row, outcome="fails", reason=reason(error))
    agrees = error < MAX_ERROR and shortfall < _ROUNDING
    return Row(**row, outcome="agrees" if agrees else "disagrees", error=error, shortfall=shortfall)


def _tiny_config(architecture: Architecture) -> PreTrainedConfig:
    """Return the configuration with `_SIZES` where it has the fields."""
    import transformers

    config: Any = transformers.CONFIG_MAPPING[architecture.wrapper or architecture.kind]
    if architecture.wrapper is None:
        return config(**_fields(config))
    text = type(config().text_config)
    fields: dict[str, Any] = _fields(config)
    fields["text_config"] = {**_fields(text), "model_type": text.model_type}
    return config(**fields)


def _fields(config: type[PreTrainedConfig]) -> dict[str, Any]:
    own = {name: value for name, value in _SIZES.items() if name in config.__dataclass_fields__}
    return own | dict(_OTHERS.get(config.model_type, {}))


def _write(config: PreTrainedConfig, folder: Path, *, is_wrapped: bool) -> PreTrainedModel:
    """Write a checkpoint with random weights and return the model in float32."""
    import torch
    import transformers

    make = (
        transformers.AutoModelForImageTextToText
        if is_wrapped
        else (transformers.AutoModelForCausalLM)
    )
    torch.manual_seed(7)
    model = make.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # Biases and norms are initialized with constants, which would hide an error.
        if parameter.ndim == 1 or name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(folder)
    return make.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _compare(model: PreTrainedModel, folder: Path) -> tuple[float, float]:
    """Return the relative error of a prompt's logits, and the shortfall of greedy tokens."""
    import jax.numpy as jnp
    from flax import nnx

    from jaxserve import Runtime, SamplingParams
    from jaxserve.models.store import load_model
    from jaxserve.testing import OPTIONS

    prompt = np.random.default_rng(0).integers(1, _VOCAB_SIZE, _NUM_PROMPT)
    loaded = load_model(str(folder), dtype="float32")
    decoder = nnx.merge(loaded.graphdef, loaded.params)
    got = nnx.jit(lambda model, tokens: model.whole_logits(tokens))(decoder, jnp.asarray([prompt]))
    wanted = _logits(model, prompt)
    error = np.linalg.norm(np.asarray(got[0]) - wanted) / np.linalg.norm(wanted)
    with Runtime.from_pretrained(str(folder), dtype="float32", max_context=64, **OPTIONS) as rt:
        params = SamplingParams(max_tokens=_NUM_ANSWER, temperature=0, ignore_eos=True)
        answer = rt.generate(prompt.tolist(), params).token_ids
    logits = _logits(model, np.asarray([*prompt, *answer[:-1]]))[len(prompt) - 1 :]
    shortfall = (logits.max(-1) - logits[np.arange(len(answer)), list(answer)]).max()
    return float(error), float(shortfall)


def _logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()


def is_whole(result: dict[str, Any]) -> bool:
    return not result["counts"]["disagrees"] and not result["counts"]["fails"]


OPTIONS = (option("--only", [], "model types; all by default", nargs="+", metavar="NAME"),)
main = Benchmark(__doc__, run, OPTIONS, "coverage", is_whole=is_whole)


if __name__ == "__main__":
    sys.exit(main())
