"""Tokenizers of Hugging Face folders: their files count as they are."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxserve.core.errors import CheckpointError, InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.engine.answers import TextAssembler
from jaxserve.engine.grammars import outline, read_vocabulary
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.build import with_token_options
from tests.common.vocabularies import with_sentencepiece_ends

pytestmark = pytest.mark.fast

SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = "▁t he ▁the or ▁w ▁wor ld ▁world ▁ t h e w o r l d".split()
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*merges: str, pattern: str = _LLAMA3) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes and these merges, with control tokens behind them."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|end|>"])
    return backend


def _space_prefix() -> tokenizers.Tokenizer:
    """Return a tokenizer with Llama 2's pipeline, which puts a space before a text."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        (word[:cut], word[cut:])
        for word in WORDS
        for cut in range(1, len(word))
        if word[:cut] in WORDS and word[cut:] in WORDS
    ]
    backend = with_sentencepiece_ends(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.add_special_tokens(list(SPECIAL))
    return backend


def _folder(folder: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["truncation", "padding"])
def test_truncation_and_padding_of_the_file_do_not_count(kind, tmp_path):
    """A prompt of 37 tokens stays one of 37 tokens, as in transformers 5.24.0."""
    backend = _byte_level()
    if kind == "truncation":
        backend.enable_truncation(max_length=16)
    else:
        backend.enable_padding(length=64, pad_id=0, pad_token="!")
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, backend))
    assert len(tokenizer.encode("a" * 37)) == 37 and len(tokenizer.encode("ab")) == 2
    tokenizer.save(tmp_path)
    assert len(Tokenizer.load(tmp_path).encode("a" * 37, parse_special=False)) == 37


@pytest.mark.parametrize("named", ["Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizerFast", None])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral", "gpt_neox"])
@pytest.mark.parametrize("kind", ["byte level", "space prefix"])
def test_the_pipeline_is_that_of_the_file(kind, named, model_type, tmp_path):
    """Ids and texts are those of `Tokenizer.from_file` (tokenizers 0.23.3), whatever is named.

    transformers 5.24.0 builds the pipeline of the class or of the model type in its place.
    """
    backend = _byte_level("1 2", "12 3", "Ġ t") if kind == "byte level" else _space_prefix()
    folder = _folder(tmp_path, backend, **({} if named is None else {"tokenizer_class": named}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer.from_folder(folder)
    for text in ("the world 12345", "  two\n\nlines", "DON'T don't", "naïve ℕ 2023", "the <s> or"):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, False) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)


def test_the_settings_add_tokens_and_not_bos(tmp_path):
    """Ids, flags and names are those of `PreTrainedTokenizerFast` of transformers 5.24.0.

    New tokens are numbered in the order of their names there, properties of known ones change, and
    `add_bos_token` does not count beside a tokenizer.json.
    """
    backend = _byte_level("t h", "th e")
    size = backend.get_vocab_size()
    listed = {"content": "<|end|>", "lstrip": True, "special": True}
    folder = _folder(
        tmp_path,
        backend,
        pad_token="[PAD]",
        bos_token={"__type": "AddedToken", "content": "[BOS]", "normalized": False},
        image_token="<img>",
        additional_special_tokens=["<s>", "<|more|>"],
        added_tokens_decoder={str(size - 1): listed, str(size): {"content": "the"}},
        add_bos_token=True,
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {
        "bos_token": "[BOS]",
        "pad_token": "[PAD]",
        "image_token": "<img>",
    }
    ids = tokenizer.encode("a [BOS][PAD]<img><|more|> <|end|>the")
    letters = [backend.token_to_id(letter) for letter in "aĠ"]
    the = backend.token_to_id("the")
    assert ids == [*letters, size, size + 1, size + 2, size + 3, size - 1, the]
    assert tokenizer.control_token_ids == {size - 2, size - 1, *range(size, size + 4)}


def test_older_files_add_tokens(tmp_path):
    """special_tokens_map.json and added_tokens.json count as in transformers 5.24.0."""
    backend = _byte_level()
    size = backend.get_vocab_size()
    folder = _folder(tmp_path, backend, eos_token="<s>")
    named = {"eos_token": {"content": "<|end|>"}, "pad_token": "<p>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "added_tokens.json").write_text(json.dumps({"<w>": size + 1, "<p>": size}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<p><w>") == [size, size + 1]
    assert size in tokenizer.control_token_ids and size + 1 not in tokenizer.control_token_ids
    assert tokenizer.eos_token_ids == (size - 1,)


def test_what_cannot_be_read_is_named(tmp_path):
    """The error has the file and what to do."""
    folder = _folder(tmp_path, _byte_level())
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read.*\n.*fetch"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(folder)


def test_templates_are_read_from_their_own_files_first(tmp_path):
    """chat_template.jinja replaces the template of tokenizer_config.json (transformers 5.24.0)."""
    folder = _folder(tmp_path, _byte_level(), chat_template=[{"name": "default", "template": "a"}])
    assert Tokenizer.from_folder(folder).chat_template == "a"
    (folder / "chat_template.jinja").write_text("b")
    assert Tokenizer.from_folder(folder).chat_template == "b"


def test_a_folder_ends_where_it_says(tmp_path):
    """Control tokens such as <|end|> do not end answers of a folder that does not declare them.

    transformers 5.24.0 goes on, too. The option `end_tokens` names more.
    """
    backend = _byte_level()
    end, start = backend.token_to_id("<|end|>"), backend.token_to_id("<s>")
    folder = _folder(tmp_path, backend, eos_token="<s>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (7, start)
    more, ends = with_token_options(tokenizer, None, _ending(["<|end|>", 3]), 300)
    assert more is not None and more.eos_token_ids == (7, start, end, 3) and ends is None
    assert with_token_options(None, (1,), _ending([3]), 300) == (None, (1, 3))
    assert with_token_options(tokenizer, (1,), _ending(()), 300) == (tokenizer, (1,))
    for wrong in ("<|no|>", 300, -1):
        with pytest.raises(InvalidConfigError, match="token"):
            with_token_options(tokenizer, None, _ending([wrong]), 300)
    with pytest.raises(InvalidConfigError, match="tokenizer"):
        with_token_options(None, None, _ending(["<|end|>"]), 300)


def _ending(more):
    return RuntimeOptions(end_tokens=more)


def test_a_chat_template_of_the_users_replaces_all_others(tmp_path):
    """As source or as a file, also for chats with tools; thinking is read as it says."""
    folder = _folder(tmp_path, _byte_level(), eos_token="<s>")
    (folder / "chat_template.jinja").write_text("a")
    own = Tokenizer.from_folder(folder)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    (tmp_path / "mine.jinja").write_text(source)
    for given in (source, tmp_path / "mine.jinja", str(tmp_path / "mine.jinja")):
        options = RuntimeOptions(chat_template=given, end_tokens=[7])
        found, _ = with_token_options(own, None, options, 300)
        assert found is not None and found.chat_template == options.chat_template == source
        assert found.tool_template is None and 7 in found.eos_token_ids
        prompt = found.apply_chat_template([{"role": "user", "content": "hi"}], tools=[])
        assert found.decode(prompt, False) == "hi<think>" and found.thinking is not None
    assert own.chat_template == "a" and own.thinking is None


def test_what_is_no_chat_template_is_refused(tmp_path):
    own = Tokenizer.from_folder(_folder(tmp_path, _byte_level(), eos_token="<s>"))
    with pytest.raises(InvalidConfigError, match=r"chat_template='mine\.jinja' cannot be read"):
        RuntimeOptions(chat_template="mine.jinja")
    with pytest.raises(InvalidConfigError, match="not a Jinja template: .*end of"):
        with_token_options(own, None, RuntimeOptions(chat_template="{% for"), 300)
    with pytest.raises(InvalidConfigError, match="this one has none"):
        with_token_options(None, None, RuntimeOptions(chat_template="{{ a }}"), 300)


@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_keeps_its_first_space(skip, tmp_path):
    """Prompt and answer together are what `decode` of tokenizers 0.23.3 gives for all tokens.

    The decoder takes a space from the beginning of a text, which an answer is not.
    """
    backend = _space_prefix()
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, backend))
    the, world, byte = (backend.token_to_id(text) for text in ("▁the", "▁world", "<0xC3>"))
    prompts = ([the], [1, the], [the, 2], [byte, the], [1], [])
    for prompt in prompts:
        for answer in ([world], [world, the], [2, world], [byte, 172, world], [world, byte]):
            decoder = tokenizer.stream_decoder(skip, after=prompt)
            text = "".join(decoder.push([token]) for token in answer) + decoder.flush()
            before, whole = (
                backend.decode(ids, skip_special_tokens=skip) for ids in (prompt, prompt + answer)
            )
            assert before + text == whole, (prompt, answer)
    decoder = tokenizer.stream_decoder(after=[the])
    assert decoder.push([world]) == " world"


def test_a_stop_string_with_a_space_is_found_at_the_first_token(tmp_path):
    """The first token of an answer completes " world"."""
    backend = _space_prefix()
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, backend))
    the, world = (backend.token_to_id(text) for text in ("▁the", "▁world"))
    assembler = TextAssembler(tokenizer.stream_decoder(after=[the]), [" world"])
    assert assembler.push([world, the, world]) == 1 and assembler.text == ""


_CHAT = "{% for m in messages %}<s>the {{ m.content }} or</s>{% endfor %}"


@pytest.mark.parametrize("content", ["a</s>b", "the(<unk>)", "<s>", "x </s> y", "</s></s>"])
def test_control_tokens_in_a_message_leave_its_text_as_it_is(content, tmp_path):
    """The ids between the template's control tokens are those of the text as a whole.

    They are those of tokenizers 0.23.3 with `encode_special_tokens`, which takes control tokens for
    text.
    """
    backend = _space_prefix()
    folder = _folder(tmp_path, backend, chat_template=_CHAT)
    ids = Tokenizer.from_folder(folder).apply_chat_template([{"content": content}])
    backend.encode_special_tokens = True
    assert ids == [1, *backend.encode(f"the {content} or").ids, 2]
    assert backend.decode(ids[1:-1], skip_special_tokens=False) == f"the {content} or"


def test_control_tokens_keep_their_properties_beside_a_shielded_one(tmp_path):
    """Tokens of the template take spaces, or stand for words alone, as without such a message."""
    backend = _byte_level()
    backend.add_special_tokens(
        [AddedToken("<l>", lstrip=True, rstrip=True), AddedToken("end", single_word=True)]
    )
    template = "{{ messages[0].content }}x <l> y end bend"
    folder = _folder(tmp_path, backend, chat_template=template)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.apply_chat_template([{"content": "<s>"}])
    backend.encode_special_tokens = True
    shielded = backend.encode("<s>").ids
    backend.encode_special_tokens = False
    assert ids == [*shielded, *backend.encode("x <l> y end bend").ids]
    assert tokenizer.decode(ids, False) == "<s>x<l>y end bend"


def test_a_token_without_an_embedding_is_left_out_of_grammars(tmp_path):
    """A tokenizer with [PAD] beyond the model's embeddings has a vocabulary for llguidance."""
    package = pytest.importorskip("llguidance")
    backend = _byte_level("t h")
    size = backend.get_vocab_size()
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, backend, pad_token="[PAD]"))
    assert tokenizer.vocab_size == size + 1 and tokenizer.added_from(size) == {size: "[PAD]"}
    for ends in ([size - 1], []):
        assert read_vocabulary(package, tokenizer, ends, size).vocab_size == size + (not ends)
    assert max(outline(tokenizer, [size - 1], size)[1]) == size - 1


def _field(number: int, value: int | float | bytes) -> bytes:
    """Return a field of a protocol buffer."""

    def varint(n: int) -> bytes:
        n &= (1 << 64) - 1
        return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def _write_sentencepiece(path: Path, *, kind: int = 2, prefix: int = 1, squeeze: int = 0) -> None:
    pieces = [*((text, 0.0, 2 + (text != "<unk>")) for text in SPECIAL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(word, -float(i), 1) for i, word in enumerate(WORDS)]
    data = b"".join(
        _field(1, _field(1, text.encode()) + _field(2, score) + _field(3, type_))
        for text, score, type_ in pieces
    )
    data += _field(2, _field(3, kind) + _field(35, 1) + _field(43, -1))
    data += _field(3, _field(1, b"identity") + _field(3, prefix) + _field(4, squeeze))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (
            1,
            [[261, 266], [267, 261, 267, 266], [267, 198, 172, 261, 13], [267, 272, 265, 270, 273]],
        ),
        (0, [[268, 260, 266], [261, 267, 266], [198, 172, 261, 13], [272, 265, 270, 273]]),
    ],
)
def test_a_sentencepiece_bpe_model_alone_is_read(prefix, expected, tmp_path):
    """Ids are those of sentencepiece 0.2.3 for this model, with BOS, which Llama's class adds."""
    _write_sentencepiece(tmp_path / "tokenizer.model", prefix=prefix)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    texts = ("the world", " the  world", "é the\n", "older")
    assert [tokenizer.encode(text, False) for text in texts] == expected
    assert [tokenizer.decode(ids) for ids in expected] == list(texts)
    assert tokenizer.encode("the world") == [1, *expected[0]]
    assert tokenizer.eos_token_ids == (2,) and tokenizer.special_tokens["bos_token"] == "<s>"
    settings = {"add_bos_token": False, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_folder(tmp_path).encode("the world") == [*expected[0], 2]


def _write_tekken(path: Path, **more: Any) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" c", b"at", b" cat", b"12"]
    given = {
        "config": {
            "pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            "default_vocab_size": len(tokens) + 6,
            "default_num_special_tokens": 6,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode()}
            for i, token in enumerate([*tokens, b"padding"])
        ],
        "special_tokens": [
            {"rank": i, "token_str": text} for i, text in enumerate([*SPECIAL, "[INST]", "[/INST]"])
        ],
    }
    path.write_text(json.dumps(given | more))


def test_a_tekken_file_alone_is_read(tmp_path):
    """Ids are those of mistral-common 1.13.1 for this file, with BOS."""
    _write_tekken(tmp_path / "tekken.json")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 268 and tokenizer.eos_token_ids == (2,)
    for text, ids in (
        ("the cat", [1, 263, 266]),
        ("th 12é", [1, 262, 38, 55, 56, 201, 175]),
        ("</s>the", [1, 66, 53, 121, 68, 263]),
    ):
        assert tokenizer.encode(text, parse_special=False) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]</s>", False) == [3, 2]
    _write_tekken(tmp_path / "tekken.json", special_tokens=None)
    with pytest.raises(CheckpointError, match=r"tekken\.json cannot be read.*\n.*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_tekken_file_beside_a_tokenizer_json_does_not_count(tmp_path):
    """The folder's tokenizer.json is read, whether mistral-common is installed or not.

    transformers 5.24.0 takes tekken.json and mistral-common where that is installed.
    """
    backend = _byte_level()
    folder = _folder(tmp_path, backend)
    _write_tekken(folder / "tekken.json")
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("the cat") == backend.encode("the cat").ids
