"""The tokenizers of GGUF files and of Hugging Face folders, with the token ids of their writers.

Token ids of GGUF files equal llama.cpp's: the pre-tokenizer table follows `llama-vocab.cpp` (names,
regular expressions and the flags that each name implies). transformers' own conversion ignores the
name, and so misses, for example, that SmolLM splits every digit.

For a folder, tokenizer.json is used unchanged; transformers would build the pipeline of most
tokenizers again, from the class that tokenizer_config.json or the model type names. Folders without
one may have Mistral's tekken.json or a SentencePiece model; transformers converts other kinds.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.core.errors import CheckpointError, UnsupportedModelError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Texts that end an answer, as llama.cpp knows them ("end of generation").
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<|end_of_text|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)

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
    """Regular expressions applied one after another, and defaults of the metadata flags."""

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
        ("default", _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
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
    response_template: Mapping[str, Any] | None = None


def read_gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> TokenizerParts:
    """Rebuild the tokenizer that `metadata` of the GGUF file `where` describes.

    Raises:
      UnsupportedModelError: a tokenizer model or pre-tokenizer that is not implemented.
      CheckpointError: vocabulary, merges, scores or special tokens are missing or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"{where} has a tokenizer of kind {kind!r}; byte-level BPE ('gpt2') and SentencePiece "
            "BPE ('llama', 'gemma4') are supported"
        )
    tokens = _tokens(metadata, where)
    types = metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if len(types) != len(tokens):
        raise _damaged(where, f"{len(types)} token types for {len(tokens)} tokens")
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens, where)
    else:
        merges = _merges(metadata, where) if kind == "gemma4" else None
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, where, merges), True
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
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unk": "unknown",
    "pad": "padding",
}
# llama.cpp's defaults for flags that the file lacks.
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"bos": 11, "eos": 11},
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gemma4": {},
}


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
    pairs = _merges(metadata, where)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = _bpe(where, vocabulary, pairs, ignore_merges=pre.ignore_merges)
    _split_to_bytes(backend, map(Regex, pre.patterns))
    return backend, pre.add_bos


def _split_to_bytes(backend: Tokenizer, patterns: Iterable[Regex]) -> None:
    """Cut a text by these patterns, one after another, and write its bytes as letters."""
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated") for pattern in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise _damaged(where, "tokenizer.ggml.merges is missing")
    # As llama.cpp: the first space that is not the first character.
    return [(merge[: merge.find(" ", 1)], merge[merge.find(" ", 1) + 1 :]) for merge in merges]


def _bpe(
    where: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], **how: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **how))
    except Exception as error:  # tokenizers raises a bare Exception
        raise _damaged(where, f"merges and tokens disagree: {error}") from error


def _sentencepiece_bpe(
    metadata: Mapping[str, Any],
    tokens: list[str],
    where: str,
    merges: list[tuple[str, str]] | None,  # None for those that equal SentencePiece's rule
) -> Tokenizer:
    """Return the tokenizer; SentencePiece's rule is to join the pair with the best result."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if merges is None:
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is None or len(scores) < len(tokens):
            raise _damaged(where, "tokenizer.ggml.scores is missing or too short")
        best_first = np.argsort(-np.asarray(scores[: len(tokens)], np.float64), kind="stable")
        merges = [
            (token[:cut], token[cut:])
            for token in (tokens[i] for i in best_first)
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0)) % len(tokens)]
    backend = _bpe(where, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
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


_PIPELINE_FILE, _TEKKEN_FILE = "tokenizer.json", "tekken.json"
_SETTINGS_FILE = "tokenizer_config.json"
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TEKKEN_NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_TEMPLATE_FILE, _TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Read the tokenizer of a folder; tokenizer_config.json adds special tokens and templates.

    Raises:
      CheckpointError: the folder has no tokenizer, or it cannot be read.
      UnsupportedModelError: a tokenizer without a fast (`tokenizers`) form.
    """
    settings = _settings(folder)
    names: dict[str, str] = {}
    model = next((name for name in _SENTENCEPIECE_FILES if (folder / name).is_file()), None)
    if (folder / _PIPELINE_FILE).is_file():
        backend = _pipeline(folder)
    elif (folder / _TEKKEN_FILE).is_file():
        backend, names = _tekken(folder)
    elif model is not None and (read := _sentencepiece(folder / model, settings)) is not None:
        backend, names = read.backend, dict(read.special_tokens)
    else:
        backend, names = _converted(folder)
    _add_tokens(backend, settings)
    names |= {name: str(token) for name, token in _named_tokens(settings).items()}
    eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    ends = [*declared_end_ids(folder), *([] if eos is None else [eos])]
    templates = chat_templates(folder, settings)
    return TokenizerParts(
        backend,
        tuple(dict.fromkeys(ends)),
        templates.get("default"),
        names,
        templates.get("tool_use"),
        settings.get("response_template"),
    )


def declared_end_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of a folder's generation_config.json, else of its config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            given = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if given is not None:
            return list(given) if isinstance(given, list) else [given]
    return []


def chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Separate files replace those of the settings."""
    files = {path.stem: path for path in (folder / _TEMPLATES_FOLDER).glob("*.jinja")}
    if (folder / _TEMPLATE_FILE).is_file():
        files["default"] = folder / _TEMPLATE_FILE
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    given = settings.get("chat_template")
    if isinstance(given, list):
        return {each["name"]: each["template"] for each in given}
    return {} if given is None else {"default": given}


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json. Older folders have parts of it in separate files."""
    settings = _json(folder / _SETTINGS_FILE)
    if "added_tokens_decoder" not in settings:
        settings |= _json(folder / "special_tokens_map.json")
        special = {token.content for token in _special_tokens(settings)}
        settings["added_tokens_decoder"] = {
            token_id: {
                "content": text,
                "special": text in special,
                "normalized": text not in special,
            }
            for text, token_id in _json(folder / "added_tokens.json").items()
        }
    return settings


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(given, dict):
        raise _unreadable(path, "it is not a JSON object")
    return given


def _unreadable(path: Path, error: object) -> CheckpointError:
    return CheckpointError(
        str(path.parent), [f"{path.name} cannot be read: {error}"], f"fetch {path.name} again"
    )


def _add_tokens(backend: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens of the settings, as transformers does; known ones get their properties."""
    listed = sorted(settings["added_tokens_decoder"].items(), key=lambda item: int(item[0]))
    backend.add_tokens([_added_token(token) for _, token in listed])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([t for t in _special_tokens(settings) if t.content not in known])


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the special tokens with names, then the other ones."""
    yield from _named_tokens(settings).values()
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if not isinstance(more, Mapping):
        yield from map(_special_token, more)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the special tokens by name (`bos_token`, ...)."""
    more = settings.get("extra_special_tokens")
    # In transformers' order, in which new ones get their ids.
    named = {f"{name}_token": None for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    named |= {**settings, **(more if isinstance(more, Mapping) else {})}
    return {
        name: _special_token(token)
        for name, token in named.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }


def _special_token(given: str | Mapping[str, Any]) -> AddedToken:
    return _added_token({"content": given} if isinstance(given, str) else given, special=True)


def _added_token(given: Mapping[str, Any], **more: Any) -> AddedToken:
    properties = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**({name: given[name] for name in properties if name in given} | more))


def _pipeline(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / _PIPELINE_FILE))
    except Exception as error:  # tokenizers raises a bare Exception
        raise _unreadable(folder / _PIPELINE_FILE, error) from error


def _tekken(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a tekken.json, as mistral-common reads it, and its special tokens.

    Its vocabulary has no merges: a pair merges if its joined bytes are a token, the first token of
    the vocabulary first.
    """
    path = folder / _TEKKEN_FILE
    given = _json(path)
    try:
        config, ranked = given["config"], sorted(given["special_tokens"], key=lambda t: t["rank"])
        special = [each["token_str"] for each in ranked]
        num_special = config.get("default_num_special_tokens") or len(special)
        special += [f"<SPECIAL_{i}>" for i in range(len(special), num_special)]
        num_bytes = (config.get("default_vocab_size") or len(given["vocab"])) - num_special
        tokens = [base64.b64decode(each["token_bytes"]) for each in given["vocab"][:num_bytes]]
        pattern = Regex(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            str(folder),
            [f"{_TEKKEN_FILE} cannot be read: {error!r}"],
            "put the model's tokenizer.json into the folder; the repositories of its quantised or "
            "converted forms have one",
        ) from error
    known, letters = set(tokens), letters_of_bytes()
    texts = ["".join(map(letters.__getitem__, token)) for token in tokens]
    merges = [
        (text[:cut], text[cut:])
        for token, text in zip(tokens, texts, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    vocabulary = {token: i for i, token in enumerate([*special, *texts])}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    _split_to_bytes(backend, (pattern,))
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.post_processor = surround(special.index("<s>"), None, special)
    return backend, {name: text for name, text in _TEKKEN_NAMES.items() if text in special}


def letters_of_bytes() -> list[str]:
    """Return the letters that byte-level vocabularies write for the bytes 0 to 255."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = (chr(number) for number in range(256, 512))
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


def _sentencepiece(path: Path, settings: Mapping[str, Any]) -> TokenizerParts | None:
    """Return the tokenizer of a SentencePiece BPE model, equal to that of its GGUF file.

    None for a file of another kind, and for models that change the text before they split it.
    """
    try:
        fields = _fields(path.read_bytes())
        pieces = [_fields(piece) for piece in fields[1]]
        training, normalizing = (_fields(fields.get(number, [b""])[0]) for number in (2, 3))
        tokens = [piece[1][0].decode("utf-8") for piece in pieces]
    except (KeyError, IndexError, ValueError):
        return None
    is_bpe = training.get(3, [1])[0] == 2
    changes_text = any(normalizing.get(2, [b""])) or normalizing.get(4, [1])[0]
    if not is_bpe or changes_text:
        return None
    scores = [memoryview(piece.get(2, [bytes(4)])[0]).cast("f")[0] for piece in pieces]
    unknown, bos, eos = (training.get(40 + i, [i])[0] for i in range(3))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [piece.get(3, [1])[0] for piece in pieces],
        "tokenizer.ggml.unknown_token_id": unknown,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_space_prefix": normalizing.get(3, [1])[0],
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token", True),
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token", False),
    }
    return read_gguf_tokenizer(metadata, str(path))


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Return the fields of a protocol buffer by number: whole numbers, or bytes."""
    fields: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        found = shift = 0
        while True:
            found |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                return found

    while at < len(data):
        field, kind = divmod(number(), 8)
        if kind == 0:
            value: Any = number()
        elif kind in (1, 2, 5):
            size = number() if kind == 2 else 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {kind}")
        fields.setdefault(field, []).append(value)
    return fields


def _converted(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer that transformers converts from other files, and its special tokens."""
    try:
        loaded = _auto_tokenizer().from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a missing or bad file
        raise CheckpointError(
            str(folder),
            [f"it has no {_PIPELINE_FILE}, and transformers makes none of its files: {error}"],
            f"put the model's {_PIPELINE_FILE} and {_SETTINGS_FILE} into the folder, or install "
            "what transformers needs for a *.model: sentencepiece and protobuf, or tiktoken",
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"the tokenizer of {folder} ({type(loaded).__name__}) has no fast form; "
            f"convert it to a {_PIPELINE_FILE}"
        )
    return backend, {name: str(text) for name, text in loaded.special_tokens_map.items()}


def _auto_tokenizer() -> Any:
    """Return transformers' class: seconds to import, so only for folders that need it.

    Its advice to install PyTorch, which nothing here uses, is suppressed.
    """
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    given = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return importlib.import_module("transformers").AutoTokenizer
    finally:
        if given is None:
            del os.environ[variable]
        else:
            os.environ[variable] = given
