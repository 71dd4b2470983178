"""Text to token ids and back, for Hugging Face folders and GGUF files alike."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, get_args

import tokenizers

from jaxserve.core.errors import InvalidConfigError, InvalidRequestError
from jaxserve.models import registry
from jaxserve.models.chat_template import FIRST_STAND_IN, ChatTemplate, Message, drawn_mark
from jaxserve.models.response_template import RegionReader, Regions, formats_of
from jaxserve.models.thinking import Opening, Thinking, ThinkingFormat, thinking_of
from jaxserve.models.tokenizer_files import (
    letters_of_bytes,
    read_folder_tokenizer,
    read_gguf_tokenizer,
)
from jaxserve.models.tool_calls import ToolFormat, format_of

if TYPE_CHECKING:
    from jaxserve.models.gguf import GGUFSource

# Tokens at the end of a prompt that are searched for the beginning or end of thinking.
_NUM_LAST = 32
_TOKENIZER_FILE, _SETTINGS_FILE = "tokenizer.json", "jaxserve_tokenizer.json"


@final
class Tokenizer:
    """Encodes, decodes and renders chats; safe to share between threads.

    Attributes:
      eos_token_ids: tokens that end an answer, the model's own first.
      chat_template: Jinja source, or None.
      tool_template: that of chats with tools, if the model has a separate one for them.
      special_tokens: names that a chat template may use (`bos_token`, ...) and their texts.
      response_template: how transformers reads an answer, if the model's folder says it.
      thinking: how the model thinks; None if it does not.
      tool_format: how it writes calls of tools.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        chat_template: str | None = None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        response_template: Mapping[str, Any] | None = None,
    ):
        # Settings of the tokenizer's training, which would cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.special_tokens = dict(special_tokens or {})
        self.response_template = response_template
        self.thinking: ThinkingFormat | None = thinking_of(chat_template or tool_template)
        self.tool_format: ToolFormat = format_of(tool_template or chat_template)
        self._regions: Regions | None = None
        if response_template is not None:
            known = self.thinking, self.tool_format
            self.thinking, self.tool_format, self._regions = formats_of(response_template, *known)
        control = {i: t.content for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._control_ids = frozenset(control)
        self._control_texts = sorted(control.values(), key=len, reverse=True)
        self._byte_fallback_ids = _byte_fallback_ids(backend)

    @classmethod
    def of_model(cls, name_or_path: str | Path, *, progress: bool = True) -> Tokenizer:
        """Read the tokenizer of a name, folder or GGUF file; download a named model first.

        Raises:
          UnknownModelError: there is no such model.
          DownloadError, ModelCacheError: see `fetch`.
          CheckpointError, UnsupportedModelError: see `from_gguf` and `from_folder`.
        """
        found = registry.resolve(name_or_path)
        path = found.fetch(weights=False, progress=progress)
        return cls.from_gguf(path) if found.kind == "gguf" else cls.from_folder(path)

    @classmethod
    def from_gguf(cls, source: str | Path | GGUFSource) -> Tokenizer:
        """Read the tokenizer from the metadata of a GGUF file; ids equal llama.cpp's.

        Raises:
          CheckpointError, UnsupportedModelError: see `read_gguf_tokenizer`.
        """
        if isinstance(source, (str, Path)):
            from jaxserve.models.gguf import GGUFSource

            source = GGUFSource(source)
        return cls(**vars(read_gguf_tokenizer(source.file.metadata, source.where)))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read a Hugging Face folder; end tokens also from generation_config.json and config.json.

        Raises:
          CheckpointError, UnsupportedModelError: see `read_folder_tokenizer`.
        """
        return cls(**vars(read_folder_tokenizer(Path(folder))))

    @property
    def vocab_size(self) -> int:
        """The number of tokens including added ones; the model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def num_own_tokens(self) -> int:
        """The number of tokens without those that were added to the vocabulary."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def added_from(self, token_id: int) -> dict[int, str]:
        """Return the texts of the added tokens from this id on."""
        added = self._backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if i >= token_id}

    def ids_of(self, tokens: Iterable[str | int]) -> tuple[int, ...]:
        """Return the ids of tokens that are given as texts or ids.

        Raises:
          InvalidConfigError: a text is not one token.
        """
        ids = []
        for token in tokens:
            token_id = token if isinstance(token, int) else self._backend.token_to_id(token)
            if token_id is None:
                raise InvalidConfigError(
                    f"{token!r} is not a token of this model; give the whole text of one, or its id"
                )
            ids.append(token_id)
        return tuple(ids)

    def ending_at(self, tokens: Iterable[str | int]) -> Tokenizer:
        """Return a tokenizer with more end tokens; see `ids_of`."""
        ends = tuple(dict.fromkeys((*self.eos_token_ids, *self.ids_of(tokens))))
        return Tokenizer(self._backend, **self._settings | {"eos_token_ids": ends})

    def with_template(self, source: str) -> Tokenizer:
        """Return a tokenizer with this chat template (Jinja) in place of all others.

        Raises:
          InvalidConfigError: it is not a template.
        """
        from jaxserve.models.jinja import TemplateError, check

        try:
            check(source)
        except TemplateError as error:
            raise InvalidConfigError(f"chat_template is not a Jinja template: {error}") from error
        templates: dict[str, Any] = {"chat_template": source, "tool_template": None}
        return Tokenizer(self._backend, **self._settings | templates)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of `text`.

        Args:
          add_special_tokens: add the begin and end tokens that the model uses.
          parse_special: control tokens spelt out in the text ("<|im_end|>") become those tokens;
            otherwise they stay ordinary text.
        """
        backend = self._backend if parse_special else self._plain_backend
        # Unlike `encode`, this lets other threads run, which a long text would block for seconds.
        (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of a pair of texts, with the tokens that the model puts around."""
        (found,) = self._backend.encode_batch_fast([(first, second)])
        return found.ids

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Return the token ids of the joined parts; control tokens in every second one are text."""
        return self._encode_parts(parts)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, with spaces unchanged; invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream_decoder(
        self,
        skip_special_tokens: bool = True,
        *,
        after: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> StreamDecoder:
        """Return a decoder for one sequence whose tokens come in pieces.

        Args:
          after: the tokens before it, whose text it continues: a first space that a decoder
            removes from the beginning of a text stays.
          shown: control tokens that the text has even if it skips others.
        """
        goes_on = any(not self._is_silent(token, skip_special_tokens) for token in reversed(after))
        before = self._inner_ids if goes_on else ()
        return StreamDecoder(self, skip_special_tokens, before, shown)

    def thinking_after(self, prompt: Sequence[int]) -> Thinking | None:
        """Return how an answer to a rendered chat may think; None if the model does not."""
        form = self.thinking
        if form is None:
            return None
        end = self.decode(prompt[-_NUM_LAST:], skip_special_tokens=False)
        if self._regions is not None:
            make_reader = partial(RegionReader, self._regions, end)
            return Thinking(form, "undecided", shown=self._control_ids, make_reader=make_reader)
        return self._thinking[form.opening(end)]

    @cached_property
    def _thinking(self) -> dict[Opening, Thinking]:
        form = self.thinking
        assert form is not None
        texts = form.starts[0], form.closing, form.first, form.bridge, form.head
        start, closing, first, bridge, head = (tuple(self.encode(text, False)) for text in texts)
        marks = {i for mark in form.marks if (i := self.added_token_id(mark)) is not None}
        return {
            opening: Thinking(
                form,
                opening,
                start_ids=start,
                closing_ids=closing,
                first_ids=first,
                bridge_ids=bridge,
                head_ids=head,
                shown=self._control_ids & marks,
            )
            for opening in get_args(Opening)
        }

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        variables: Message | None = None,
    ) -> list[int]:
        """Return the token ids of a chat up to the model's answer; see `ChatTemplate.apply`.

        `tool_template`, if there is one, renders chats with tools, also with an empty list of them,
        as in transformers.

        Raises:
          InvalidRequestError: the model has no chat template, or the template refuses the messages.
        """
        return self._template_of(has_tools=tools is not None).apply(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def template_variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the names of the variables that the chat template reads.

        Raises:
          InvalidRequestError: the model has no chat template.
        """
        return self._template_of(has_tools=has_tools).variables

    def chat_continuation(
        self,
        asked: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        variables: Message | None = None,
    ) -> list[int] | None:
        """Return the token ids after an answer's own when a chat continues with `new`, or None.

        See `ChatTemplate.continuation`.

        Raises:
          InvalidRequestError: as `apply_chat_template`.
        """
        template = self._template_of(has_tools=tools is not None)
        return template.continuation(asked, answer, new, tools=tools, variables=variables)

    def takes_text_arguments(self, *, has_tools: bool) -> bool:
        """Return whether calls have their arguments as text; see `ChatTemplate`.

        Raises:
          InvalidRequestError: the model has no chat template.
        """
        return self._template_of(has_tools=has_tools).takes_text_arguments

    def writes_calls(self, *, has_tools: bool) -> bool:
        """Return whether the template writes the calls of the history; see `ChatTemplate`.

        Raises:
          InvalidRequestError: the model has no chat template.
        """
        return self._template_of(has_tools=has_tools).writes_calls

    @property
    def takes_system(self) -> bool:
        """Whether the template of chats without tools takes a system's message.

        Raises:
          InvalidRequestError: the model has no chat template.
        """
        return self._template_of(has_tools=False).takes_system

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of vocabulary and chat template; equal hashes mean equal token ids."""
        tokens = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        named = [] if self.tool_template is None else [self.tool_template]
        told = json.dumps([tokens, self.chat_template, *named])
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def control_token_ids(self) -> frozenset[int]:
        """The tokens that stand for no text."""
        return self._control_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds after other tokens; none for an id without token.

        If several tokens make one character, each has a part of its bytes.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_fallback_ids:
            return bytes([int(token[3:-1], 16)])
        if self._is_byte_level:
            if all(letter in _BYTES for letter in token):
                return bytes(_BYTES[letter] for letter in token)
            return token.encode()
        before = self.decode(self._inner_ids, skip_special_tokens=False)
        return self.decode([*self._inner_ids, token_id], False)[len(before) :].encode()

    def added_token_id(self, text: str) -> int | None:
        """Return the token that was added to the vocabulary for this text; None without one."""
        added = self._backend.get_added_tokens_decoder()
        return next((i for i, token in added.items() if token.content == text), None)

    def to_json(self, num_tokens: int) -> str:
        """Return the backend as a tokenizer.json, without added tokens from this id on."""
        if not self.added_from(num_tokens):
            return self._backend.to_str()
        given = json.loads(self._backend.to_str())
        given["added_tokens"] = [each for each in given["added_tokens"] if each["id"] < num_tokens]
        return json.dumps(given)

    def save(self, folder: str | Path) -> None:
        """Write files for `load` into an existing folder."""
        self._backend.save(str(Path(folder) / _TOKENIZER_FILE), pretty=False)
        (Path(folder) / _SETTINGS_FILE).write_text(json.dumps(self._settings), encoding="utf-8")

    @property
    def _settings(self) -> dict[str, Any]:
        """The arguments that, beside the backend, make an equal tokenizer."""
        return {
            "eos_token_ids": self.eos_token_ids,
            "chat_template": self.chat_template,
            "tool_template": self.tool_template,
            "special_tokens": self.special_tokens,
            "response_template": self.response_template,
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of a Hugging Face tokenizer into an existing folder.

        Of several end tokens, transformers knows the model's own.
        """
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
        }
        for token_id in self.eos_token_ids[:1]:
            settings["eos_token"] = str(self._backend.id_to_token(token_id))
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        if self.response_template is not None:
            settings["response_template"] = self.response_template
        self._backend.save(str(Path(folder) / _TOKENIZER_FILE), pretty=False)
        (Path(folder) / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the files of `save`; errors of a damaged file propagate."""
        settings = json.loads((Path(folder) / _SETTINGS_FILE).read_text(encoding="utf-8"))
        return cls(tokenizers.Tokenizer.from_file(str(Path(folder) / _TOKENIZER_FILE)), **settings)

    def _is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        if token_id in self._control_ids:
            return skip_special_tokens
        return self._backend.id_to_token(token_id) is None

    @cached_property
    def _inner_ids(self) -> tuple[int, ...]:
        """A token whose text makes the next ones not the beginning of a text; none if unknown."""
        numbers = range(self.vocab_size)
        silent = self._control_ids | self._byte_fallback_ids
        inner = (i for i in numbers if i not in silent and self.decode([i]).isalnum())
        return tuple(islice(inner, 1))

    @cached_property
    def _is_byte_level(self) -> bool:
        space = self._backend.token_to_id("Ġ")
        return space is not None and self.decode([space]) == " "

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """Return a copy that treats control tokens as text, a setting of the whole backend."""
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _encode_parts(self, parts: Sequence[str]) -> list[int]:
        return self.encode(parts[0], False) if len(parts) == 1 else self._part_encoder.encode(parts)

    @cached_property
    def _part_encoder(self) -> _PartEncoder:
        return _PartEncoder(self._backend, self._control_ids)

    def _template_of(self, *, has_tools: bool) -> ChatTemplate:
        is_own = has_tools and self.tool_template is not None
        template = self._templates["tools" if is_own else "chats"]
        if template is None:
            also = "" if self.tool_template is None else " for chats without tools"
            raise InvalidRequestError(
                f"this model has no chat template{also}; send a plain text prompt, or use an "
                "instruction-tuned model"
            )
        return template

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate | None]:
        sources = {"chats": self.chat_template, "tools": self.tool_template}
        return {
            name: None if source is None else self._template(source)
            for name, source in sources.items()
        }

    def _template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.special_tokens, self._control_texts, self._encode_parts)


@final
class _PartEncoder:
    """Encodes texts in which some control tokens count and others are ordinary text.

    Its backend treats all of them as text, and has stand-ins for those that count. The texts of
    stand-ins are drawn, so that no message can be written to contain them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control_ids: Iterable[int]):
        added = backend.get_added_tokens_decoder()
        control = sorted(control_ids, key=lambda token_id: -len(added[token_id].content))
        mark, more, patterns = drawn_mark(), [], []
        ids: dict[str, int] = {}
        self._stand_ins: dict[str, str] = {}
        for i, token_id in enumerate(control):
            token, stand_in = added[token_id], f"{mark}{chr(FIRST_STAND_IN + i)}"
            self._stand_ins[token.content], ids[stand_in] = stand_in, token_id
            sides = dict(lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized)
            more.append(tokenizers.AddedToken(stand_in, **sides))
            text = re.escape(token.content)
            patterns.append(rf"(?<!\w){text}(?!\w)" if token.single_word else text)
        self._pattern = re.compile("|".join(patterns))
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        self._backend.add_tokens(more)
        known = self._backend.get_added_tokens_decoder()
        self._ids = {i: ids[token.content] for i, token in known.items() if token.content in ids}

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Return the token ids of the joined parts; control tokens in every second one are text.

        The text is encoded as a whole: where it is cut, some tokenizers would put spaces.
        """
        text = "".join(
            part if i % 2 else self._pattern.sub(lambda found: self._stand_ins[found[0]], part)
            for i, part in enumerate(parts)
        )
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return [self._ids.get(token_id, token_id) for token_id in found.ids]


# The bytes that the letters of a byte-level vocabulary stand for.
_BYTES = {letter: byte for byte, letter in enumerate(letters_of_bytes())}

# Bytes of a character in UTF-8, and tokens that may wait for others before some are given up.
_MAX_CHARACTER = 4
_MOST_PENDING = 2 * _MAX_CHARACTER


@final
class StreamDecoder:
    """Decodes one sequence token by token.

    The joined pieces from `push` and `flush` equal `decode` of all tokens, or the text that these
    add to the tokens `before`. No piece ends inside a character: the decoder keeps its
    bytes until the character is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        before: Sequence[int] = (),
        shown: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_ids = tokenizer._byte_fallback_ids
        self._shown = shown if skip_special_tokens else ()
        # The last tokens that gave text, as context for the decoder, and those after them.
        self._ids = list(before)
        self._num_read = len(self._ids)
        self._context = self._decode(self._ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that `token_ids` complete; "" while a character is incomplete."""
        return "".join(map(self._push_one, token_ids))

    def kept(self) -> str:
        """Return the complete characters that `push` has not returned yet."""
        if len(self._ids) == self._num_read:
            return ""
        return self._decode(self._ids)[len(self._context) :].rstrip("\ufffd")

    def hidden(self, token_id: int) -> str:
        """Return the text of a control token that `push` leaves out; "" for other tokens."""
        is_control = token_id in self._tokenizer.control_token_ids
        is_hidden = self._skip_special_tokens and is_control and token_id not in self._shown
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if is_hidden else ""

    def copy(self) -> StreamDecoder:
        """Return a decoder that goes on from the same tokens."""
        copied = copy(self)
        copied._ids = list(self._ids)
        return copied

    def flush(self) -> str:
        """Return the text of kept bytes, U+FFFD for incomplete characters, and start over."""
        rest = self._decode(self._ids)[len(self._context) :]
        self._ids, self._num_read, self._context = [], 0, ""
        return rest

    def _push_one(self, token_id: int) -> str:
        if token_id in self._shown:
            text = self.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._ids = list(self._tokenizer._inner_ids)
            self._num_read, self._context = len(self._ids), self._decode(self._ids)
            return text
        if self._tokenizer._is_silent(token_id, self._skip_special_tokens):
            return ""
        self._ids.append(token_id)
        # A run of byte tokens is decoded as a whole: one bad byte makes all of it invalid.
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        if len(text) > len(self._context) and not text.endswith("\ufffd"):
            return self._given(text, 0)
        if len(self._ids) - self._num_read <= _MOST_PENDING:
            return ""
        # No token completes invalid bytes: only the last tokens may begin a character, of at most
        # four bytes. If the rest ends inside one, its text is not a prefix of the whole text.
        for num_left in range(_MAX_CHARACTER - 1, 2 * _MAX_CHARACTER):
            head = self._decode(self._ids[:-num_left])
            if len(head) > len(self._context) and text.startswith(head):
                return self._given(head, num_left)
        return ""

    def _given(self, text: str, num_left: int) -> str:
        """Return the new text of all but the last tokens, which then are the context."""
        piece = text[len(self._context) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids) - num_left
        self._context = self._decode(self._ids[: self._num_read])
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of "<0x00>" to "<0xFF>" if the decoder joins bytes to characters."""
    letter = backend.token_to_id("<0x41>")
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
