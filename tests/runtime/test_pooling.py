"""Embeddings, classifications and rankings of a runtime are those of PyTorch transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    EmptyPromptError,
    InvalidConfigError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    NumericalError,
    OtherTaskError,
    PromptTooLongError,
    TokenOutOfRangeError,
    UnknownAdapterError,
)
from jaxserve.sharding import StagePlan, make_groups, make_mesh
from jaxserve.testing import (
    OPTIONS,
    FaultyExecutor,
    letter_tokenizer,
    random_prompts,
    tiny_llama,
    tiny_t5,
    write_chat_model,
)
from tests.common.tiers import some
from tests.models.hf_checkpoints import (
    VOCAB_SIZE,
    torch_hidden,
    torch_labels,
    write_classifier,
    write_embedder,
)

RNG = np.random.default_rng(5)
# More texts than slots; some are longer than a step.
TEXTS = [RNG.integers(2, VOCAB_SIZE, n).tolist() for n in (1, 9, 100, 30, 2, 70, 5)]
LOADING: dict[str, Any] = {**OPTIONS, "dtype": "float32", "max_context": 128}


def write_tokenizer(folder: Path, *, end: int | None = None) -> None:
    """Write a tokenizer of one token a letter, which ends texts with token `end` if it is given."""
    letters = [chr(33 + i) for i in range(VOCAB_SIZE - 2)]
    vocab = {"<pad>": 0, "<end>": 1} | {letter: i + 2 for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<pad>", "<end>"])
    if end is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A <end>", pair="$A <end> $B <end>", special_tokens=[("<end>", end)]
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_modules(folder: Path, **pooling: bool) -> None:
    """Write files of sentence-transformers that pool and do not normalise."""
    modules = [{"path": "", "type": "st.Transformer"}, {"path": "1_Pooling", "type": "st.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def of_length_one(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """The folder of a model without a head, whose texts end with an end token, and the model."""
    folder = tmp_path_factory.mktemp("embedder")
    model = write_embedder("llama", folder)
    write_tokenizer(folder, end=1)
    return str(folder), model


@pytest.fixture(scope="module")
def tiny():
    """A runtime of a tiny model of tokens."""
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **OPTIONS) as rt:
        yield rt


def test_embeddings_are_those_of_pytorch(embedder):
    """In any batch, in chunks, alone and beside answers, in the order given."""
    folder, model = embedder
    wanted = of_length_one(np.stack([torch_hidden(model, text)[-1] for text in TEXTS]))
    with Runtime.from_pretrained(folder, **LOADING) as rt:
        found = rt.embed(TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        np.testing.assert_allclose(rt.embed(TEXTS[::-1])[::-1], found, atol=1e-5)
        np.testing.assert_allclose(rt.embed(TEXTS[2]), found[2], atol=1e-5)
        text = torch_hidden(model, [ord(letter) - 31 for letter in "abc"] + [1])[-1]
        np.testing.assert_allclose(rt.embed("abc"), of_length_one(text), atol=1e-4)
        cut = rt.embed(TEXTS, dimensions=7)
        np.testing.assert_allclose(cut, of_length_one(wanted[:, :7]), atol=1e-4)
        raw = rt.embed(TEXTS, normalize=False)
        np.testing.assert_allclose(of_length_one(raw), wanted, atol=1e-4)
        assert rt.embed([]).shape == (0, 48)
        with pytest.raises(OtherTaskError, match="without a head.*embed"):
            rt.generate([1, 2])
        rt.check_integrity()


def test_the_mean_over_tokens(embedder, tmp_path):
    """Sums of chunks add up, and nothing compiles after the warm-up."""
    _, model = embedder
    write_embedder("llama", tmp_path)
    write_modules(tmp_path, pooling_mode_mean_tokens=True)
    wanted = np.stack([torch_hidden(model, text).mean(0) for text in TEXTS])
    with Runtime.from_pretrained(
        str(tmp_path), **LOADING | {"strict": True, "warmup": True, "max_slots": 2}
    ) as rt:
        found = rt.embed(TEXTS)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        np.testing.assert_allclose(rt.embed(TEXTS[2]), found[2], atol=1e-5)


def test_texts_and_answers_run_together(tiny):
    """Preemptions of either change nothing."""
    prompts = random_prompts(12)
    alone = [tiny.embed(prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=20)
    tokens = [tiny.generate(prompt, params).token_ids for prompt in prompts[:4]]
    with Runtime(
        tiny_llama(), **OPTIONS | {"kv_memory": 12 * 8 * 2 * 2 * 2 * 8 * 4, "policy": "vllm_like"}
    ) as rt:
        pending = [rt.submit(prompt, params) for prompt in prompts[:4]]
        found = rt.embed(prompts)
        assert [one.result().token_ids for one in pending] == tokens
        rt.check_integrity()
    np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.parametrize("variant", some(["llama", "qwen3", "gpt2", "gemma2", "opt_350m", "gptj"]))
def test_labels_are_those_of_pytorch(variant, tmp_path):
    """Padding at the end of a text does not count."""
    model = write_classifier(variant, tmp_path, 3, pad_token_id=0)
    texts = [*TEXTS, [*TEXTS[1], 0, 0]]
    wanted = np.stack([torch_labels(model, text) for text in texts])
    with Runtime.from_pretrained(str(tmp_path), **LOADING) as rt:
        found = rt.classify(texts)
        np.testing.assert_allclose(found.logits, wanted, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(found.probabilities.sum(-1), 1, rtol=1e-5)
        assert found.names == ("LABEL_0", "LABEL_1", "LABEL_2")
        assert found.best == [found.names[i] for i in wanted.argmax(-1)]
        one = rt.classify(texts[0])
        np.testing.assert_allclose(one.logits, found.logits[0], atol=1e-5)
        assert one.best == found.best[0]
        for call in (lambda: rt.generate(TEXTS[0]), lambda: rt.embed(TEXTS)):
            with pytest.raises(OtherTaskError, match=r"classifier with 3 labels.*classify\(\)"):
                call()
        with pytest.raises(OtherTaskError, match="does not rank"):
            rt.rerank("a", ["b"])


def test_a_reward_model_ranks_pairs(tmp_path):
    """Pairs are encoded as the tokenizer does; relevances are between 0 and 1.

    Nothing compiles after the warm-up, which makes no step that draws tokens.
    """
    model = write_classifier("qwen3", tmp_path, 1)
    write_tokenizer(tmp_path, end=1)

    def pair(query: str, document: str) -> list[int]:
        return [*(ord(i) - 31 for i in query), 1, *(ord(i) - 31 for i in document), 1]

    documents = ["bcd", "xy", "ABCDEFG", "z"]
    wanted = [1 / (1 + np.exp(-torch_labels(model, pair("ab", each))[0])) for each in documents]
    options = LOADING | {"strict": True, "warmup": True}
    with Runtime.from_pretrained(str(tmp_path), **options) as rt:
        np.testing.assert_allclose(
            rt.classify(TEXTS).logits, [torch_labels(model, each) for each in TEXTS], atol=1e-4
        )
        found = rt.rerank("ab", documents)
        assert [each.index for each in found] == np.argsort(wanted)[::-1].tolist()
        assert [each.document for each in found] == [documents[each.index] for each in found]
        np.testing.assert_allclose(
            [each.relevance_score for each in found], np.sort(wanted)[::-1], atol=1e-4
        )
        assert rt.rerank("ab", documents, top_n=2) == found[:2]
        assert rt.rerank("ab", []) == []
        for bad in (dict(top_n=0), dict(instruction="x"), dict(documents="abc")):
            with pytest.raises(InvalidRequestError):
                rt.rerank(**{"query": "ab", "documents": documents, **bad})
        with pytest.raises(InvalidRequestError, match="document 1: "):
            rt.rerank("ab", ["a", ""])


def test_what_cannot_be_embedded(tiny):
    """An error names the text among several, and no text is computed."""
    bad = [
        ("", EmptyPromptError),
        ([], EmptyPromptError),
        ([97], TokenOutOfRangeError),
        ([1] * 129, PromptTooLongError),
        (3, InvalidRequestError),
    ]
    num_steps = tiny.stats().num_steps
    for text, error in bad:
        with pytest.raises(error, match="text 1: "):
            tiny.embed(["a", text])
    with pytest.raises(InvalidRequestError):
        tiny.embed(None)
    for dimensions in (0, 33, True, 1.5):
        with pytest.raises(InvalidRequestError, match="dimensions"):
            tiny.embed("a", dimensions=dimensions)
    with pytest.raises(UnknownAdapterError):
        tiny.embed("a", adapter="none")
    assert tiny.stats().num_steps == num_steps
    assert tiny.embed([1] * 128).shape == (32,)
    with pytest.raises(OtherTaskError, match=r"embed\(\).*reranker='qwen3'"):
        tiny.rerank("a", ["b"])
    with pytest.raises(OtherTaskError, match="without labels"):
        tiny.classify("a")


@pytest.mark.fast
@pytest.mark.parametrize(
    "given", [dict(n=2, temperature=1.0), dict(logprobs=0), dict(regex="a"), dict(latency_bound=1)]
)
def test_parameters_that_need_tokens(given):
    """A request that pools has none."""
    with pytest.raises(InvalidSamplingParamsError, match="pools=True"):
        SamplingParams(pools=True, **given)


def test_an_encoder_decoder_embeds_nothing():
    """Its encoder's states are those of `encode`."""
    with Runtime(tiny_t5(), **OPTIONS) as rt, pytest.raises(OtherTaskError, match="encode"):
        rt.embed([[1, 2, 3]])


def test_states_that_are_not_finite():
    """The text's request fails, and the engine continues."""

    def faulty(executor):
        return FaultyExecutor(executor, not_finite_at=0)

    with Runtime(tiny_llama(), wrap_executor=faulty, **OPTIONS) as rt:
        with pytest.raises(NumericalError):
            rt.embed([1, 2, 3])
        assert rt.embed([1, 2, 3]).shape == (32,)


@pytest.mark.release
@pytest.mark.parametrize("where", ["stages", "groups", "tensor"])
@pytest.mark.parametrize("kind", ["last", "mean", "labels"])
def test_on_several_devices(where, kind, tmp_path):
    """Stages, device groups and shards give the embeddings of one device."""
    if kind == "labels":
        write_classifier("llama", tmp_path, 3)
    else:
        write_embedder("llama", tmp_path)
    if kind == "mean":
        write_modules(tmp_path, pooling_mode_mean_tokens=True)
    meshes = {
        "stages": lambda: StagePlan.of([1, 1]),
        "groups": lambda: make_groups(encode=1, decode=1),
        "tensor": lambda: make_mesh(tensor=2),
    }

    def states(rt: Runtime) -> np.ndarray:
        return rt.classify(TEXTS).logits if kind == "labels" else rt.embed(TEXTS)

    with Runtime.from_pretrained(str(tmp_path), **LOADING) as rt:
        wanted = states(rt)
    policy = {"policy": "exegpt_waa_c"} if where == "groups" else {}
    with Runtime.from_pretrained(str(tmp_path), mesh=meshes[where](), **LOADING | policy) as rt:
        np.testing.assert_allclose(states(rt), wanted, atol=1e-4, rtol=1e-4)


def test_qwen3_reranker_answers_yes_or_no(tmp_path):
    """A relevance is the probability of "yes" against "no"; control tokens in texts are text."""
    folder = write_chat_model(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["yes", "no"])
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    options = {**LOADING, "load": "random", "reranker": "qwen3", "max_context": 1024}
    with Runtime.from_pretrained(folder, **options) as rt:
        tokenizer, documents = rt.tokenizer, ["It is Beijing.", "Gravity pulls<|im_end|>."]
        wanted = []
        for document in documents:
            tokens = tokenizer.encode_parts(
                [
                    "<|im_start|>system\nJudge whether the Document meets the requirements based "
                    "on the Query and the Instruct provided. Note that the answer can only be "
                    '"yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: find it\n<Query>: ',
                    "Where?",
                    "\n<Document>: ",
                    document,
                    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                ]
            )
            assert tokens.count(259) == 2
            no, yes = (rt.score([*tokens, answer])[-1] for answer in (258, 257))
            wanted.append(1 / (1 + np.exp(no - yes)))
        found = rt.rerank("Where?", documents, instruction="find it")
        for each in found:
            assert each.relevance_score == pytest.approx(wanted[each.index], abs=1e-4)
        assert found[0].relevance_score > found[1].relevance_score
        assert rt.classify("a").names == ("no", "yes")
        assert len(rt.generate("a", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3
        with pytest.raises(OtherTaskError, match=r"reranker.*rerank\(\)"):
            rt.embed("a")


def test_a_reranker_needs_a_tokenizer():
    """And one in which its answers are tokens."""
    for tokenizer in (None, letter_tokenizer()):
        with pytest.raises(InvalidConfigError, match="reranker='qwen3'"):
            Runtime(tiny_llama(), tokenizer=tokenizer, reranker="qwen3", **OPTIONS)
