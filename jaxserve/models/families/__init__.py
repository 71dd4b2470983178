"""All families of models: the `FAMILY` of each file here (docs/adding_a_model.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError, UnsupportedModelError
from jaxserve.models.config import DecoderConfig, check_sizes
from jaxserve.models.family import Family
from jaxserve.models.pooling import labels_of
from jaxserve.models.weights import Weight

# The files of families by `model_type`, where they have other names. A type that is not here is
# found, too, once all files have been imported.
_FILES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek"),
    **dict.fromkeys(("persimmon", "falcon", "bloom"), "gpt_neox"),
    **dict.fromkeys(("gemma2", "gemma3_text", "vaultgemma"), "gemma"),
    "gemma4_text": "gemma4",
    **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2"), "glm_moe"),
    **dict.fromkeys(("gpt_bigcode", "gpt_neo", "gptj", "codegen", "mpt"), "gpt2"),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), "granite"),
    "lfm2_moe": "lfm2",
    **dict.fromkeys(("mistral", "ministral", "ministral3", "internlm3", "cwm", "arcee"), "llama"),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), "llama"),
    **dict.fromkeys(("qwen3", "qwen3_vl_text", "seed_oss", "smollm3", "phi3"), "llama"),
    **dict.fromkeys(("glm", "glm4", "ernie4_5", "helium"), "llama"),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "exaone4"), "llama"),
    "llama4_text": "llama4",
    **dict.fromkeys(("mamba2", "falcon_mamba"), "mamba"),
    **dict.fromkeys(("mixtral", "olmoe", "gpt_oss", "phimoe"), "moe"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"), "moe"),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), "moe"),
    **dict.fromkeys(("biogpt", "xglm"), "opt"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "qwen3_next"),
    **dict.fromkeys(("starcoder2", "nemotron", "jais2", "cohere", "cohere2"), "stablelm"),
    "mt5": "t5",
}


@final
class _Families(Mapping[str, Family]):
    """The families by `model_type`; the file of one is imported when it is first looked up."""

    def __init__(self, folder: Iterable[str]):
        self._files = tuple(module.name for module in iter_modules(folder))
        self._found: dict[str, Family] = {}
        self._has_all = False

    def __getitem__(self, kind: str) -> Family:
        if kind not in self._found:
            self._import(_FILES.get(kind, kind))
        if kind not in self._found:
            self._import_all()
        return self._found[kind]

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(self._found)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def of(self, config: type[DecoderConfig]) -> Family | None:
        """Return the family of a class of configurations; None if it was not registered."""
        self._import(config.__module__.removeprefix(f"{__name__}."))
        return next((each for each in self._found.values() if each.config is config), None)

    def add(self, family: Family) -> None:
        self._found |= dict.fromkeys(family.fields, family)

    def _import(self, *files: str) -> None:
        """Add the families of these files, in this order; a name without a file has none."""
        known = [each for each in files if each in self._files]
        families = [import_module(f"{__name__}.{each}").FAMILY for each in known]
        own = {kind: family for family in families for kind in family.fields}
        self._found = own | self._found

    def _import_all(self) -> None:
        if not self._has_all:
            self._import(*self._files)
            self._has_all = True


FAMILIES = _Families(__path__)


def register_family(family: Family) -> None:
    """Add a family, so that models of its `model_type`s load, by config.json or as a `Decoder`.

    Raises:
      InvalidConfigError: another family has one of its `model_type`s.
    """
    taken = [kind for kind in family.fields if FAMILIES.get(kind, family) is not family]
    if taken:
        raise InvalidConfigError(
            f"model_type={taken[0]!r} has a family already; give the new one another name in "
            "`fields` and config.json"
        )
    FAMILIES.add(family)


# Models of images and text, and whether the head of their text model is the embedding if
# config.json does not state it.
WRAPPERS: Mapping[str, bool] = MappingProxyType(
    {
        "gemma3": True,
        "gemma4": True,
        "internvl": True,
        "llava": False,
        "llava_next": False,
        "llava_onevision": False,
        "mistral3": True,
        "qwen2_vl": False,
        "qwen2_5_vl": False,
        "qwen3_vl": False,
        "qwen3_5": False,
        "qwen3_5_moe": False,
        "qwen3_vl_moe": False,
        "llama4": False,
    }
)
# Fields of a config.json that change no computation of a model that generates text.
_NO_STRUCTURE = (
    r"_.*|architectures|auto_map|chunk_size_feed_forward|id2label|is_(?:decoder|encoder_decoder)|"
    r"label2id|model_type|pretraining_tp|problem_type|return_dict|task_specific_params|"
    r"transformers_version|type_vocab_size|use_cache|(?:torch_)?dtype|"
    r"output_.*|.*token_ids?|.*(?:dropout|_drop|pdrop|_dropout_prob|layerdrop|_loss_coef).*|"
    r".*(?:initializer_range|init_std|initializer_factor)"
)


def config_from_hf(given: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a model of any family, from config.json as a dictionary.

    For a model of images and text, it is that of the text model.

    Raises:
      UnsupportedModelError: naming what is given and what is supported.
    """
    whole, given = given, text_config_of(given)
    kind = str(given.get("model_type"))
    if kind not in FAMILIES:
        nearest, unread = nearest_family(given)
        lacking = f"does not read {', '.join(unread)}" if unread else "computes something else"
        raise UnsupportedModelError(
            f"model_type={kind!r}{_classes(given)} is not supported; the nearest of the "
            f"{len(FAMILIES) + len(WRAPPERS)} that are is {nearest!r}, which {lacking}; "
            "docs/models.md lists them"
        )
    check_sizes(given)
    config = FAMILIES[kind].config.from_hf(given)
    fields = FAMILIES[kind].fields[kind]
    labels = labels_of(whole, given.get("pad_token_id", fields.pad_token_id))
    if labels is None:
        return config
    if config.has_encoder:
        raise UnsupportedModelError(
            f"architectures={whole['architectures']!r}: classifiers of encoder-decoder models are "
            "not served; those of decoders are"
        )
    return config.without_token_head(labels)


def nearest_family(given: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the supported `model_type` that reads most of the fields given, and the others.

    Fields that say nothing about the model's computations are left out.
    """
    own = {name for name in given if not re.fullmatch(_NO_STRUCTURE, name)}

    def read_by(kind: str) -> set[str]:
        fields = FAMILIES[kind].fields[kind]
        return {*fields.defaults, *fields.aliases}

    nearest = max(FAMILIES, key=lambda kind: (len(own & read_by(kind)), -len(read_by(kind) - own)))
    return nearest, tuple(sorted(own - read_by(nearest)))


def _classes(given: Mapping[str, Any]) -> str:
    names = given.get("architectures")
    return f" ({', '.join(map(str, names))})" if isinstance(names, Sequence) and names else ""


def text_config_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text model; itself for a model of texts."""
    kind = str(given.get("model_type"))
    if kind not in WRAPPERS:
        return given
    text = given.get("text_config")
    if text is None and kind.startswith(
        "qwen2"
    ):  # their folders have the fields of the text outside
        text = {**given, "model_type": f"{kind}_text"}
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"model_type={kind!r} in config.json needs an object text_config, and has {text!r}"
        )
    # The wrapper's field on ties decides, as in transformers.
    return {**text, "tie_word_embeddings": given.get("tie_word_embeddings", WRAPPERS[kind])}


def family_of(config: DecoderConfig) -> Family:
    """Return the family of a configuration.

    Raises:
      UnsupportedModelError: it was not registered.
    """
    family = FAMILIES.of(type(config))
    if family is None:
        raise UnsupportedModelError(
            f"{type(config).__name__} belongs to no family; call jaxserve.register_family(FAMILY) "
            "first (docs/own_model.md)"
        )
    return family


def weights_of(config: DecoderConfig) -> Mapping[str, Weight]:
    """Return the tensors that fill each parameter of a model, by the parameter's path."""
    return {**family_of(config).weights(config), "score": Weight.of("score.weight", "e n", "n e")}
