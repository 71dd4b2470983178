"""The facade: prompts in, completions out, and each bad input refused without effect on others."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    DeviceMemoryError,
    EmptyPromptError,
    GenerationInterrupted,
    InvalidConfigError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    NumericalError,
    PromptTooLongError,
    RuntimeClosedError,
    TokenOutOfRangeError,
    UnknownModelError,
)
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.scheduling.iteration.request_level import Static
from jaxserve.scheduling.presets import get_policy
from jaxserve.steps.step_function import COMPILED_EVENT, LOADED_EVENT
from jaxserve.testing import ExecutorWrapper, RecordingExecutor, SlowExecutor, WrapAll
from jaxserve.testing.tiny import (
    CONFIG,
    MAX_CONTEXT,
    OPTIONS,
    VOCAB_SIZE,
    letter_tokenizer,
    random_prompts,
    tiny_llama,
)
from jaxserve.workload import recorded
from tests.common.processes import heeding_interrupts, interrupt
from tests.common.waiting import until

WARM = OPTIONS | {"strict": True, "warmup": True}
GREEDY = SamplingParams(max_tokens=20)


@pytest.fixture(scope="module")
def runtime():
    """A runtime around a tiny model, with a tokenizer of letters."""
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **WARM) as runtime:
        yield runtime


def test_batch_keeps_its_order_and_single_prompts_their_shape(runtime):
    """A batch gives a list in the order of the prompts; one prompt gives one completion."""
    prompts = random_prompts(20)
    batch = runtime.generate(prompts, GREEDY)
    assert [c.prompt_token_ids for c in batch] == prompts
    single = runtime.generate(prompts[3], GREEDY)
    assert single.token_ids == batch[3].token_ids
    assert single.finish_reason == "length"
    assert len(single.token_ids) == 20
    assert runtime.generate([], GREEDY) == []


def test_text_token_ids_and_chats_are_prompts(runtime):
    """A text is tokenized; a chat is rendered by the template; both may be in one batch."""
    text, ids, chat = runtime.generate(
        ["hello", [1, 2, 3], [{"role": "user", "content": "hi"}]], GREEDY
    )
    assert text.prompt_token_ids == tuple(runtime.tokenizer.encode("hello"))
    assert ids.prompt_token_ids == (1, 2, 3)
    assert len(chat.prompt_token_ids) > 2
    assert text.text == runtime.tokenizer.decode(list(text.token_ids))


def test_parameters_for_each_prompt(runtime):
    params = [SamplingParams(max_tokens=n) for n in (1, 7, 3)]
    completions = runtime.generate(random_prompts(3), params)
    assert [len(c.token_ids) for c in completions] == [1, 7, 3]
    with pytest.raises(InvalidConfigError, match="3 SamplingParams for 2 prompts"):
        runtime.generate(random_prompts(2), params)


def test_generation_ends_at_the_context(runtime):
    completion = runtime.generate([5] * 100, SamplingParams(max_tokens=None))
    assert len(completion.token_ids) == MAX_CONTEXT - 100
    assert completion.finish_reason == "length"


def test_forced_lengths(runtime):
    """An answer has exactly its forced length; max_tokens and the context do not matter."""
    lengths = (1, 6, 19)
    params = [SamplingParams(max_tokens=n and 40, forced_length=n) for n in lengths]
    completions = runtime.generate(random_prompts(3), params)
    assert [len(c.token_ids) for c in completions] == list(lengths)
    assert {c.finish_reason for c in completions} == {"length"}
    free = runtime.generate([1] * 5, SamplingParams(max_tokens=None, forced_length=7))
    assert len(free.token_ids) == 7


def test_samples_have_their_own_forced_lengths(runtime):
    """There is one length for all samples, or one for each; another number is refused."""
    params = SamplingParams(max_tokens=None, temperature=1.0, n=3, forced_length=(2, 7, 4))
    completion = runtime.generate([1, 2, 3], params)
    assert [len(sample.token_ids) for sample in completion.samples] == [2, 7, 4]
    with pytest.raises(InvalidSamplingParamsError, match="2 lengths for n=1"):
        SamplingParams(forced_length=(2, 7))


def test_a_recorded_run_replays_to_the_same_tokens(tmp_path):
    """A replay of what `record` wrote has the same tokens, however the answers had ended."""
    path = tmp_path / "run.jsonl"
    tokenizer = letter_tokenizer()
    with Runtime(tiny_llama(), tokenizer=tokenizer, record=path, **OPTIONS) as runtime:
        free = runtime.generate("hello", SamplingParams(max_tokens=30))
        asked = [
            SamplingParams(max_tokens=30, stop=free.text[4:6]),
            SamplingParams(max_tokens=9, temperature=0.8, top_k=20),
            SamplingParams(max_tokens=12, temperature=1.0, n=2, logit_bias={3: 2.0}),
        ]
        first = [free, *runtime.generate(["hello", [4, 5], "abc"], asked)]
        assert len(recorded.read(path)) == 4, "lines are there before the answers"
        pending = runtime.submit([1], SamplingParams(max_tokens=None), priority=2, deadline_s=9)
        pending.cancel()
        first.append(pending.result(30))
    trace = recorded.read(path)
    assert [r.prompt_token_ids for r in trace] == [c.prompt_token_ids for c in first]
    assert (trace[4].priority, trace[4].finish_reasons) == (2, ("cancelled",))
    assert trace[4].deadline_s - trace[4].arrival_s == pytest.approx(9)
    items = recorded.recorded_items(path)
    with Runtime(tiny_llama(), seed=5, **OPTIONS) as runtime:
        again = runtime.generate([i.prompt_token_ids for i in items], [i.params() for i in items])
    for one, two in zip(first[:4], again, strict=False):
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in two.samples]
    with pytest.raises(InvalidConfigError, match="is not empty"):
        Runtime.from_pretrained("smollm2-135m", record=path)


def test_stop_string_ends_text_before_it(runtime):
    """Tokens include the one that completes the stop string; the text ends before it."""
    free = runtime.generate([1, 2, 3], SamplingParams(max_tokens=20))
    stop = free.text[8:10]
    cut = runtime.generate([1, 2, 3], SamplingParams(max_tokens=20, stop=stop))
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.find(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) == free.text.find(stop) + 2


def test_an_answer_goes_on_with_the_text_of_its_prompt(runtime):
    """Prompt and answer are the text of all tokens: the first space stays, streamed and whole."""
    words = {f"▁{i}": i for i in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁0"))
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend, eos_token_ids=())
    with Runtime(tiny_llama(), tokenizer=tokenizer, **WARM) as spaced:
        answer = spaced.generate([5, 6], GREEDY)
        pieces = "".join(piece.text for piece in spaced.stream([5, 6], GREEDY))
        stop = replace(GREEDY, stop=(f" {answer.token_ids[0]}",))
        stopped = spaced.generate([5, 6], stop)
    assert answer.text == pieces == "".join(f" {token}" for token in answer.token_ids)
    assert backend.decode([5, 6]) + answer.text == backend.decode([5, 6, *answer.token_ids])
    assert stopped.text == "" and len(stopped.token_ids) == 1


def test_samples_of_one_prompt(runtime):
    params = SamplingParams(max_tokens=10, temperature=1.0, n=3, seed=4)
    completion = runtime.generate([1, 2, 3], params)
    assert len({s.token_ids for s in completion.samples}) == 3
    again = runtime.generate([1, 2, 3], params)
    assert again.samples == completion.samples


def test_logprobs_where_asked_for(runtime):
    """Log-probabilities of output and prompt are in the completion; otherwise they are None."""
    with_them, without = runtime.generate(
        [[1, 2, 3], [4, 5]],
        [SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=0), SamplingParams(max_tokens=4)],
    )
    assert [entry.token_id for entry in with_them.logprobs] == list(with_them.token_ids)
    assert all(len(entry.top) == 2 for entry in with_them.logprobs)
    assert with_them.prompt_logprobs[0] is None
    assert [e.token_id for e in with_them.prompt_logprobs[1:]] == [2, 3]
    assert without.logprobs is None and without.prompt_logprobs is None


def test_streamed_pieces_join_to_the_completion(runtime):
    """Pieces have all tokens and all text; the last one has the finish reason."""
    whole = runtime.generate("stream me", GREEDY)
    pieces = list(runtime.stream("stream me", GREEDY))
    assert "".join(p.text for p in pieces) == whole.text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"


def test_leaving_a_stream_cancels_its_request(runtime):
    for _ in runtime.stream([1, 2], SamplingParams(max_tokens=None)):
        break
    until(lambda: not runtime.outlook())


def test_asyncio_twins_agree(runtime):
    """`agenerate` and `astream` return the same as `generate`."""

    async def both():
        batch = await runtime.agenerate(random_prompts(4), GREEDY)
        pieces = [piece async for piece in runtime.astream(random_prompts(4)[2], GREEDY)]
        with pytest.raises(EmptyPromptError):
            await runtime.agenerate("", GREEDY)
        return batch, tuple(t for p in pieces for t in p.token_ids)

    batch, streamed = asyncio.run(both())
    expected = runtime.generate(random_prompts(4), GREEDY)
    assert [c.token_ids for c in batch] == [c.token_ids for c in expected]
    assert streamed == expected[2].token_ids


def test_many_threads_may_submit_at_once(runtime):
    prompts = random_prompts(12, seed=8)
    expected = [c.token_ids for c in runtime.generate(prompts, GREEDY)]
    got: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        got[i] = runtime.generate(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(len(prompts))] == expected


def test_arrays_and_generators_are_batches(runtime):
    """NumPy and JAX arrays of token ids are prompts, 2-D ones batches; generators lose no item."""
    prompts = [(1, 2, 3), (4, 5, 6)]
    expected = [c.token_ids for c in runtime.generate(prompts, GREEDY)]
    for batch in (np.array(prompts), [jnp.array(p) for p in prompts], (p for p in prompts)):
        assert [c.token_ids for c in runtime.generate(batch, GREEDY)] == expected
    assert runtime.generate(np.array(prompts[0]), GREEDY).token_ids == expected[0]


@pytest.mark.release
def test_a_time_window_delays_the_batch():
    """Under `triton_window` a single request waits for the window, and later ones join it."""
    options = OPTIONS | {"policy": "triton_window"}
    with Runtime(tiny_llama(), **options) as runtime:
        pending = [runtime.submit([1, 2], GREEDY)]
        time.sleep(0.1)
        pending.append(runtime.submit([3], GREEDY))
        first, second = (p.result(60).timing for p in pending)
    assert first.admitted_s - first.arrival_s >= 0.5
    assert second.admitted_s == pytest.approx(first.admitted_s, abs=0.05)


def test_a_window_longer_than_a_lock_can_wait_ends_nothing():
    """A batch that waits for a window of centuries is cancelled like any other."""
    policy = replace(get_policy("triton_window"), iteration=Static(window_s=1e10))
    with Runtime(tiny_llama(), **OPTIONS | {"policy": policy}) as runtime:
        waiting = runtime.submit([1, 2], GREEDY)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        waiting.cancel()
        assert waiting.result(30).finish_reason == "cancelled"


def test_leaving_an_asyncio_stream_cancels_only_its_request(runtime):
    """Closing a loop in the middle of a stream cancels only that request."""

    async def leave():
        async for _ in runtime.astream([1, 2], SamplingParams(max_tokens=None)):
            break

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.agenerate([[1]] * 20, GREEDY), 0.001)

    for _ in range(3):
        asyncio.run(leave())
        asyncio.run(give_up())
    assert len(runtime.generate([1, 2, 3], GREEDY).token_ids) == 20
    until(lambda: not runtime.outlook())


def test_a_consumer_that_raises_gets_no_more(runtime, caplog):
    """A sink's error is logged; its request and the engine continue."""

    def broken(piece):
        raise ValueError("no thanks")

    pending = runtime.submit([1, 2, 3], GREEDY, on_piece=broken)
    assert len(pending.result(30).token_ids) == 20
    assert caplog.text.count("it gets no more") == 1


def test_a_consumer_that_asks_is_refused(runtime):
    """It would wait for the engine on the engine's thread."""
    refused: list[str] = []
    asks = (
        lambda: runtime.generate([1]),
        lambda: runtime.stream([1]),
        lambda: runtime.conversation().send([1]),
        lambda: runtime.resize_kv("1MiB"),
    )

    def asking(piece):
        for ask in asks:
            try:
                ask()
            except InvalidRequestError as error:
                refused.append(str(error))

    pending = runtime.submit([1, 2, 3], SamplingParams(max_tokens=1), on_piece=asking)
    assert len(pending.result(30).token_ids) == 1
    assert len(refused) == len(asks) and all("on another thread" in each for each in refused)


def test_a_running_id_is_refused_again(runtime):
    """Ids are unique among running requests, and can be used again afterwards."""
    pending = runtime.submit([1], SamplingParams(max_tokens=None), request_id="twice")
    with pytest.raises(InvalidRequestError, match="still running"):
        runtime.submit([2], request_id="twice")
    pending.cancel()
    pending.result(30)
    assert runtime.submit([2], GREEDY, request_id="twice").result(30).finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="choose another"):
        runtime.submit([2], request_id="request-1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": 3},
        {"priority": "high"},
        {"priority": True},
        {"priority": 2**31},
        {"priority": 10**400},
        {"deadline_s": "3"},
        {"deadline_s": 10**400},
        {"deadline_s": float("nan")},
    ],
)
def test_a_wrong_argument_of_a_request_is_refused_alone(runtime, wrong):
    """The error names the argument, and other requests are answered."""
    [name] = wrong
    running = runtime.submit([1], GREEDY, deadline_s=float("inf"))
    with pytest.raises(InvalidRequestError, match=name):
        runtime.submit([2], GREEDY, **wrong)
    assert running.result(30).finish_reason == "length"


def test_a_prompt_longer_than_the_pool_is_refused():
    """If the page pool is smaller than the context, it limits the prompt."""
    options = OPTIONS | {"kv_memory": "20KB"}
    with Runtime(tiny_llama(), **options) as runtime:
        most = (runtime.config.num_pages - 1) * runtime.config.page_size
        assert most < MAX_CONTEXT
        with pytest.raises(PromptTooLongError, match=f"at most {most - 1}.*kv_memory"):
            runtime.generate([1] * most)
        assert len(runtime.generate([1] * (most - 1), GREEDY).token_ids) == 1


def test_a_dropped_runtime_frees_its_pool():
    """Without `close`, the garbage collector ends the thread and frees the pages."""
    before, seen = set(threading.enumerate()), WrapAll()
    runtime = Runtime(tiny_llama(), wrap_executor=seen, **OPTIONS)
    (thread,) = set(threading.enumerate()) - before
    cache = jax.tree.leaves(seen.executors[0].pages.cache)
    del runtime
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and all(array.is_deleted() for array in cache)


def test_cancelling_ends_what_runs():
    """A request with tokens ends at once with these, long before its limit."""
    begun = threading.Event()
    options = OPTIONS | {"wrap_executor": SlowExecutor, "max_decode_iterations": 1}
    with Runtime(tiny_llama(), **options) as rt:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        pending = rt.submit(
            [1, 2, 3], params, on_piece=lambda piece: begun.set(), request_id="mine"
        )
        assert begun.wait(60) and pending.request_id == "mine"
        rt.cancel("unknown")
        pending.cancel()
        completion = pending.result(60)
    assert completion.finish_reason == "cancelled" and 0 < len(completion.token_ids) < 90


def test_ctrl_c_tells_what_is_finished():
    """An interrupt of `generate` cancels the rest and raises with every request's completion."""

    class Interrupting(ExecutorWrapper):
        """An executor that interrupts at the tenth step."""

        num_steps = 0

        def submit(self, plan):
            self.num_steps += 1
            if self.num_steps == 10:
                interrupt()
                time.sleep(0.2)
            return self.inner.submit(plan)

    params = [SamplingParams(max_tokens=2), *[SamplingParams(max_tokens=None)] * 20]
    options = OPTIONS | {"wrap_executor": Interrupting}
    with Runtime(tiny_llama(), **options) as runtime, heeding_interrupts():
        with pytest.raises(GenerationInterrupted) as interrupted:
            runtime.generate(random_prompts(21, longest=20), params)
    completions = interrupted.value.completions
    assert completions[0].finish_reason == "length"
    assert "cancelled" in {c.finish_reason for c in completions[1:]}
    assert len(completions) == 21


BAD_PROMPTS = {
    "empty text": ("", EmptyPromptError, "empty"),
    "no tokens": ([], EmptyPromptError, "empty"),
    "too long": ([1] * MAX_CONTEXT, PromptTooLongError, f"{MAX_CONTEXT} tokens"),
    "token too large": ([1, VOCAB_SIZE], TokenOutOfRangeError, f"{VOCAB_SIZE}"),
    "negative token": ([-1, 2], TokenOutOfRangeError, "-1"),
    "mixed list": ([1, "a"], InvalidRequestError, "all token ids"),
    "number": (3.5, InvalidRequestError, "float"),
    "none": (None, InvalidRequestError, "NoneType"),
    "message without a list": ({"role": "user", "content": "a"}, InvalidRequestError, "dict"),
    "lone surrogate": ("a\ud83d", InvalidRequestError, "surrogate"),
    "array of floats": (np.ones(3), InvalidRequestError, "all token ids"),
    "matrix": (np.ones((2, 2), int), InvalidRequestError, "all token ids"),
    "bytes": (b"abc", InvalidRequestError, "decode"),
    "token id": (5, InvalidRequestError, "int"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt_is_refused_alone(runtime, name):
    """Its typed error has the given value; the other requests are answered."""
    prompt, error, said = BAD_PROMPTS[name]
    good = random_prompts(2)
    before = runtime.generate(good, GREEDY)
    first, refused, last = runtime.generate([good[0], prompt, good[1]], GREEDY)
    assert [first.token_ids, last.token_ids] == [c.token_ids for c in before]
    assert refused.finish_reason == "error" and type(refused.error) is error
    assert said in str(refused.error)
    with pytest.raises(error):
        runtime.submit(prompt)


@pytest.mark.parametrize("wrong", [5, {"role": "user", "content": "a"}, b"abc"])
def test_a_wrong_first_prompt_leaves_the_others(runtime, wrong):
    """A batch that begins with what a prompt consists of is a batch, and not one mixed prompt."""
    good = random_prompts(1)
    refused, answered = runtime.generate([wrong, good[0]], GREEDY)
    assert type(refused.error) is InvalidRequestError
    if isinstance(wrong, bytes):
        with pytest.raises(InvalidRequestError, match="decode"):
            runtime.generate(wrong, GREEDY)
    assert answered.token_ids == runtime.generate(good, GREEDY)[0].token_ids


BAD_PARAMS = {
    "no tokens": {"max_tokens": 0},
    "max_tokens past int32": {"max_tokens": 2**31},
    "max_tokens past any float": {"max_tokens": 10**400},
    "temperature past any float": {"temperature": 10**400},
    "a bound past any float": {"latency_bound": 10**400},
    "a penalty of nothing": {"repetition_penalty": 1e-38},
    "negative temperature": {"temperature": -1.0},
    "nan": {"temperature": float("nan")},
    "top_p of zero": {"top_p": 0.0},
    "min_p over one": {"min_p": 1.001},
    "min over max": {"min_tokens": 9, "max_tokens": 4},
    "greedy samples": {"n": 2},
    "many stops": {"stop_token_ids": tuple(range(17))},
    "many stop strings": {"stop": ("x",) * 65},
    "long stop string": {"stop": ("x", "y" * 257)},
    "empty stop": {"stop": ""},
    "true for a number": {"top_k": True},
    "text for a number": {"top_p": "0.5"},
    "too many logprobs": {"logprobs": 21},
    "top_k past int32": {"top_k": 2**31},
    "min_tokens past int32": {"min_tokens": 2**31, "max_tokens": None},
    "forced past max": {"forced_length": 9, "max_tokens": 4},
    "no stop": {"stop": None},
    "a number for stop tokens": {"stop_token_ids": 3},
    "a list for a bias": {"logit_bias": [1]},
    "huge bias": {"logit_bias": {1: float("inf")}},
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_contradictory_sampling_parameters_are_refused(name):
    """The constructor raises an error that names the field."""
    with pytest.raises(InvalidSamplingParamsError) as raised:
        SamplingParams(**BAD_PARAMS[name])
    assert any(field in str(raised.value) for field in BAD_PARAMS[name])


def test_parameters_that_only_the_model_can_judge(runtime):
    """Stop tokens and biases outside the vocabulary are refused at submission."""
    with pytest.raises(TokenOutOfRangeError, match="stop_token_ids"):
        runtime.generate([1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)))
    with pytest.raises(TokenOutOfRangeError):
        runtime.generate([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))


def test_bad_options_are_refused_before_anything_is_loaded():
    """Unknown options, policies, sizes and models raise errors with the allowed values."""
    with pytest.raises(InvalidConfigError, match=r"max_slot is not known; did you mean max_slots"):
        Runtime.from_pretrained("smollm2-135m", max_slot=4)
    with pytest.raises(InvalidConfigError, match="vllm_like"):
        Runtime.from_pretrained("smollm2-135m", policy="vlm")
    with pytest.raises(InvalidConfigError, match="4GiB"):
        Runtime(tiny_llama(), kv_memory="lots")
    with pytest.raises(InvalidConfigError, match="max_slots=0"):
        Runtime(tiny_llama(), max_slots=0)
    absurd = {
        "max_slots": 10**9,
        "max_step_tokens": 10**9,
        "max_decode_iterations": 10**30,
        "num_speculative_tokens": 10**6,
        "page_size": None,
        "seed": "abc",
    }
    for name, value in absurd.items():
        with pytest.raises(InvalidConfigError, match=f"{name}={value!r} is not allowed"):
            Runtime(tiny_llama(), speculation="lookup", **{name: value})
    with pytest.raises(InvalidConfigError, match="bfloat16"):
        Runtime.from_pretrained("smollm2-135m", dtype="flaot32")
    with pytest.raises(UnknownModelError, match="smollm2-135m"):
        Runtime.from_pretrained("smollm3")


def test_no_memory_says_what_would_fit():
    """A pool that is larger than the memory, or too small, raises an error with the sizes."""
    with pytest.raises(DeviceMemoryError, match="at most"):
        Runtime(tiny_llama(), kv_memory="900TiB", progress=False)
    with pytest.raises(DeviceMemoryError, match="at least 2"):
        Runtime(tiny_llama(), kv_memory=10, progress=False)


def test_poisoned_weights_fail_requests_and_not_the_runtime():
    """NaN logits give the request a typed error; the runtime continues."""
    model = tiny_llama()
    model.norm.scale[...] = model.norm.scale[...] * jnp.nan
    with Runtime(model, **OPTIONS) as runtime:
        for _ in range(2):
            completions = runtime.generate([[1, 2], [3]], GREEDY)
            assert all(isinstance(c.error, NumericalError) for c in completions)


def test_closed_runtime_refuses_and_frees():
    """Close ends running requests and frees the pool; later calls raise; a second close passes."""
    seen = WrapAll()
    runtime = Runtime(tiny_llama(), wrap_executor=seen, **OPTIONS)
    cache = jax.tree.leaves(seen.executors[0].pages.cache)
    pending = runtime.submit([1, 2, 3], SamplingParams(max_tokens=None))
    runtime.close()
    runtime.close()
    assert pending.result(10).finish_reason in ("cancelled", "error")
    assert all(array.is_deleted() for array in cache)
    with pytest.raises(RuntimeClosedError):
        runtime.generate([1, 2])


def test_random_weights_for_a_config(tmp_path):
    """load="random" needs only a config.json, and serves token ids."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 64}))
    with Runtime.from_pretrained(str(tmp_path), load="random", **OPTIONS) as runtime:
        assert len(runtime.generate([1, 2, 3], GREEDY).token_ids) == 20
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            runtime.generate("text")


def test_executors_can_be_wrapped():
    """The engine drives the executor that `wrap_executor` returned, and closes it."""
    warm = []

    def wrap(executor):
        warm.append(executor.is_warm)
        return RecordingExecutor(executor)

    seen = WrapAll(wrap)
    with Runtime(tiny_llama(), wrap_executor=seen, **WARM) as rt:
        assert rt.generate([1, 2, 3], GREEDY).finish_reason == "length"
        (recording,) = seen.executors
        assert warm == [True] and len(recording.plans) == rt.stats().num_steps > 0
    with pytest.raises(RuntimeClosedError):
        recording.fitted(None)


class _Fixed(ExecutorWrapper):
    """An executor that declares that its pool cannot be resized, like those of a group."""

    can_resize = False


def test_a_pool_that_cannot_be_resized_is_left_alone():
    """The error comes before any request is changed; requests continue."""
    with Runtime(tiny_llama(), wrap_executor=_Fixed, **OPTIONS) as rt:
        pool = rt.config
        running = rt.submit([1, 2, 3], GREEDY)
        with pytest.raises(InvalidConfigError, match="several processes serve cannot be resized"):
            rt.resize_kv("1MiB")
        assert running.result(30).finish_reason == "length" and rt.config == pool


class _NotServing(ExecutorWrapper):
    """An executor with which no engine can be built."""

    is_closed = False

    @property
    def swap_costs(self):
        raise RuntimeError("no costs")

    def close(self) -> None:
        self.inner.close()
        self.is_closed = True


def test_a_runtime_that_cannot_be_made_closes_its_executors():
    """Their page pools do not remain on the devices."""
    wrapped = WrapAll(_NotServing)
    with pytest.raises(RuntimeError, match="no costs"):
        Runtime(tiny_llama(), wrap_executor=wrapped, **OPTIONS)
    assert [executor.is_closed for executor in wrapped.executors] == [True]


def test_a_second_runtime_of_a_model_compiles_nothing():
    """Its steps are those that the first one has traced and compiled, with other weights too."""
    num_compiled = 0
    events = ("/jax/core/compile/backend_compile_duration", COMPILED_EVENT, LOADED_EVENT)

    def on_event(event: str, seconds: float, **_: object) -> None:
        nonlocal num_compiled
        num_compiled += event in events

    def tokens(seed: int) -> tuple[int, ...]:
        with Runtime(tiny_llama(seed), **OPTIONS | {"max_slots": 3, "warmup": "full"}) as rt:
            return rt.generate([5, 6, 7], SamplingParams(max_tokens=9)).token_ids

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        first, num_first = tokens(0), num_compiled
        other, again = tokens(1), tokens(0)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    assert first == again != other
    assert num_compiled == num_first > 5
