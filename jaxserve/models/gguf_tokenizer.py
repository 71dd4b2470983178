"""The tokenizer inside a GGUF file, rebuilt so that its token ids equal llama.cpp's.

The pre-tokenizer table follows `llama-vocab.cpp` of llama.cpp: names, regular expressions and the
flags each name implies. transformers' own conversion ignores the name, and so misses, for one,
that SmolLM splits every digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.core.errors import CheckpointError, UnsupportedModelError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Texts that end an answer, as llama.cpp knows them ("end of generation").
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)  # fmt: skip

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"
_LOWER, _UPPER = r"((?=[\p{L}])([^A-Z]))", r"((?=[\p{L}])([^a-z]))"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}|"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = _CASED.replace("{end}", "") + r"\p{N}" + _CASED_REST
_GPT4O = _CASED.replace("{end}", f"{_CONTRACTION}?") + r"\p{N}{1,3}" + _CASED_REST
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@final
@dataclass(frozen=True)
class _PreTokenizer:
    """Regular expressions applied one after the other, and defaults of the metadata flags."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    name: pre
    for names, pre in (
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        ),
        ("dbrx smaug-bpe chatglm-bpe", _PreTokenizer((_LLAMA3,))),
        ("glm4", _PreTokenizer((_LLAMA3,), ignore_merges=True)),
        (
            "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
            _PreTokenizer((_QWEN2,)),
        ),
        (
            "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
            _PreTokenizer((r"\p{N}", _GPT2)),
        ),
        (
            "gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion granite-docling",
            _PreTokenizer((_GPT2,)),
        ),
        ("falcon", _PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
        (
            "default",
            _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        ),
        ("tekken", _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
        ("gpt-4o llama4 kanana2", _PreTokenizer((_GPT4O,))),
        (
            "deepseek-v3 hunyuan-dense joyai-llm",
            _PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
        ),
        (
            "deepseek-coder",
            _PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        ),
    )
    for name in names.split()
}


@final
@dataclass(frozen=True)
class TokenizerParts:
    """The parts of a `Tokenizer`. `special_tokens` has the names that chat templates use."""

    backend: Tokenizer
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: Mapping[str, str]
    tool_template: str | None = None


def read_gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> TokenizerParts:
    """Rebuild the tokenizer that `metadata` of the GGUF file `where` describes.

    Raises:
      UnsupportedModelError: a tokenizer model or pre-tokenizer that is not implemented.
      CheckpointError: vocabulary, merges, scores or special tokens are missing or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{where} has a tokenizer of kind {kind!r}; byte-level BPE ('gpt2') and SentencePiece "
            "BPE ('llama') are supported"
        )
    tokens = _tokens(metadata, where)
    types = metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if len(types) != len(tokens):
        raise _damaged(where, f"{len(types)} token types for {len(tokens)} tokens")
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens, where)
    else:
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, where), True
    special = _special_ids(metadata, kind, len(tokens), where)
    ends = _end_ids(special, tokens, types)
    control = {i for i, t in enumerate(types) if t in (_UNKNOWN, _CONTROL)} | set(ends)
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(control)]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for i, token in enumerate(tokens)
            if types[i] == _USER_DEFINED and i not in control
        ]
    )
    bos = eos = None
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        bos = special.get("bos")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = special.get("eos")
    backend.post_processor = surround(bos, eos, tokens)
    names = {f"{name}_token": tokens[i] for name, i in special.items() if name in _TEMPLATE_NAMES}
    named = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    template, for_tools = (text if isinstance(text, str) else None for text in named)
    return TokenizerParts(backend, ends, template, names, for_tools)


_TEMPLATE_NAMES = ("bos", "eos", "unk", "pad")
_SPECIAL_KEYS = {
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding",
}  # fmt: skip
# llama.cpp's defaults for flags that the file lacks.
_DEFAULT_IDS = {"gpt2": {"bos": 11, "eos": 11}, "llama": {"bos": 1, "eos": 2, "unk": 0}}


def _damaged(where: str, problem: str) -> CheckpointError:
    return CheckpointError(
        where, [f"tokenizer: {problem}"], "convert the model again with a current llama.cpp"
    )


def _tokens(metadata: Mapping[str, Any], where: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _damaged(where, "tokenizer.ggml.tokens is missing")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise _damaged(where, "tokenizer.ggml.tokens holds duplicates")
    return tokens


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str], where: str
) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"{where} needs the pre-tokenizer {name!r}; known are {sorted(_PRE_TOKENIZERS)}. "
            "A Hugging Face folder of the same model works without it"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise _damaged(where, "tokenizer.ggml.merges is missing")
    # As llama.cpp: the first space that is not the first character.
    pairs = [(merge[: merge.find(" ", 1)], merge[merge.find(" ", 1) + 1 :]) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises a bare Exception
        raise _damaged(where, f"merges and tokens disagree: {error}") from error
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    """Return the merges that equal SentencePiece's rule: join the pair whose result scores best."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(tokens):
        raise _damaged(where, "tokenizer.ggml.scores is missing or too short")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    best_first = np.argsort(-np.asarray(scores[: len(tokens)], np.float64), kind="stable")
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in best_first)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0)) % len(tokens)]
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *undo]
    )
    return backend


def _special_ids(
    metadata: Mapping[str, Any], kind: str, num_tokens: int, where: str
) -> dict[str, int]:
    ids = dict(_DEFAULT_IDS[kind])
    for name, key in _SPECIAL_KEYS.items():
        given = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(given, int):
            ids[name] = given
    # Out of range: llama.cpp warns and ignores it.
    ids = {name: i for name, i in ids.items() if 0 <= i < num_tokens}
    if "eos" not in ids:
        raise _damaged(where, "no usable tokenizer.ggml.eos_token_id")
    return ids


def _end_ids(special: Mapping[str, int], tokens: list[str], types: Any) -> tuple[int, ...]:
    """Return the declared end tokens, then control tokens that are known by their text."""
    declared = [special[name] for name in ("eos", "eot", "eom") if name in special]
    index = {token: i for i, token in enumerate(tokens)}
    known = [index[text] for text in _END_TEXTS if text in index]
    return tuple(dict.fromkeys(declared + [i for i in known if types[i] == _CONTROL]))


def surround(bos: int | None, eos: int | None, tokens: list[str]) -> Any:
    """Return the post-processor that puts these tokens around a text."""
    before = [] if bos is None else [f"{tokens[bos]}:0"]
    after = [] if eos is None else [f"{tokens[eos]}:0"]
    named = [(tokens[i], i) for i in (bos, eos) if i is not None]
    return TemplateProcessing(
        single=[*before, "$A:0", *after], pair=None, special_tokens=list(dict(named).items())
    )
