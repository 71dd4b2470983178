"""The draft model of a runtime: loaded, and checked against the model that is served."""

from __future__ import annotations

from typing import Any, cast

from flax import nnx

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.config import DecoderConfig
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.store import load_model
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.steps.drafting import Drafter


def load_drafter(
    options: RuntimeOptions,
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    *,
    has_mesh: bool,
) -> Drafter | None:
    """Return the draft model of the options; None without one.

    Args:
      config, tokenizer: of the model that is served.
      has_mesh: whether a mesh, stages or device groups were given.

    Raises:
      InvalidConfigError: the draft model does not fit the model, or cannot be served beside it.
      ModelError, DownloadError: it cannot be loaded.
    """
    given = options.draft_model
    if given is None:
        return None
    if has_mesh:
        raise InvalidConfigError(
            "draft_model= with a mesh, stages or device groups: the draft model is on one device; "
            "omit mesh, or pass speculation='lookup' without draft_model"
        )
    if isinstance(given, nnx.Module):
        model, own = cast(Any, given), None
    else:
        loaded = load_model(
            given,
            dtype=config.dtype,
            quantisation=Quantisation.at_loading(RuntimeOptions(), None),
            progress=options.progress,
        )
        model, own = cast(Any, nnx.merge(loaded.graphdef, loaded.params)), loaded.tokenizer
    _check(model.config, config, options)
    if own is not None and tokenizer is not None and own.vocab_size != tokenizer.vocab_size:
        raise InvalidConfigError(
            f"draft_model={given!r} has a tokenizer of {own.vocab_size} tokens, and the model one "
            f"of {tokenizer.vocab_size}; pass a draft model with the same tokenizer"
        )
    graphdef, params = nnx.split(model)
    return Drafter(graphdef, params, model.config, model.layer_layout)


def _check(draft: DecoderConfig, served: DecoderConfig, options: RuntimeOptions) -> None:
    """Check the configuration of a draft model against that of the model that is served."""
    for name, each in (("the draft model", draft), ("a model with a draft model", served)):
        if each.has_encoder or each.num_recurrent_layers:
            raise InvalidConfigError(
                f"{name} must be a decoder with attention alone, without an encoder and recurrent "
                "layers; pass another one, or omit draft_model"
            )
    if (draft.vocab_size, draft.dtype) != (served.vocab_size, served.dtype):
        raise InvalidConfigError(
            f"the draft model has {draft.vocab_size} tokens in {draft.dtype}, and the model "
            f"{served.vocab_size} in {served.dtype}; pass one that has the same of both"
        )
    context = min(options.max_context or served.default_context, served.max_position_embeddings)
    if draft.max_position_embeddings < context:
        raise InvalidConfigError(
            f"the draft model has a context of {draft.max_position_embeddings} tokens, and the "
            f"runtime one of {context}; pass max_context={draft.max_position_embeddings}, or "
            "another draft model"
        )
