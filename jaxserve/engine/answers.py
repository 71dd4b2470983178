"""Converts sequences to the pieces and completions that users get."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, final

from jaxserve.core.errors import GrammarFailedError, JaxserveError, StaleWeightsError
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion, FinishReason, Request, Sample, Timing, TokenLogprob
from jaxserve.engine.grammars import CompiledGrammar
from jaxserve.models.thinking import Thinking
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.scheduling.scheduler import Progress, Scheduler
from jaxserve.scheduling.sequence import Phase
from jaxserve.scheduling.sequence import Sequence as Running

_log = logging.getLogger(__name__)


class Detokenizer(Protocol):
    """An incremental detokenizer: the joined pieces are the text of all tokens."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def kept(self) -> str:
        """Return the complete characters of tokens of which `push` has returned no text yet."""
        ...

    def hidden(self, token_id: int) -> str:
        """Return the text of a control token that `push` leaves out; "" for other tokens."""
        ...

    def flush(self) -> str: ...


@final
class TextAssembler:
    """The text of one sample so far, and the part of it that may be delivered.

    Text that may be the beginning of a stop string is held back.

    Args:
      stops: strings that end the text. A control token that the text leaves out is searched for
        too, if one of them contains its text.
      min_tokens: a stop string that ends within this many tokens does not count, as in vLLM.
      thinking: how the sample may think; None if its text is not separated.

    Attributes:
      text: all of it, the thinking with its marks included.
      num_reasoning: the number of tokens of the thinking so far.
    """

    def __init__(
        self,
        decoder: Detokenizer,
        stops: Sequence[str],
        min_tokens: int = 0,
        thinking: Thinking | None = None,
    ):
        self.text = ""
        self.num_reasoning = 0
        self._thinking = thinking
        # Of all text, which counts the tokens of the thinking; and with stop strings, which hold
        # text back, of what is delivered.
        self._reader = None if thinking is None else thinking.reader()
        self._delivering = thinking.reader() if thinking is not None and stops else None
        self._is_counting = thinking is not None
        self._num_uncounted = 0
        self._pending: list[tuple[str, str]] = []  # that the first one has read
        self._decoder = decoder
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_shown = 0
        # The end of the searched text, and for each of its characters its place in the text. Those
        # of a control token that the text leaves out have the place of what follows them.
        self._tail = ""
        self._places: list[int] = []
        self._num_known = 0

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens; return how many complete a stop string, which the text ends before."""
        if not self._stops:
            if self._is_counting:
                for token_id in token_ids:
                    self._add(token_id)
            else:
                self._read(self._decoder.push(token_ids))
            return None
        for used, token_id in enumerate(token_ids, 1):
            self._add(token_id)
            # A stop string ends the answer at its own last token, although the decoder may still
            # wait for a byte that changes how the last bytes are shown.
            known = self.text + self._decoder.kept()
            num_searched = self._extend_tail(known, self._decoder.hidden(token_id))
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                continue
            starts = [(stop, max(0, num_searched - len(stop) + 1)) for stop in self._stops]
            found = [at for stop, start in starts if (at := self._tail.find(stop, start)) >= 0]
            if found:
                self.text = known[: self._places[min(found)]]
                return used
        return None

    def _add(self, token_id: int) -> None:
        self._read(self._decoder.push([token_id]))
        if not self._is_counting or self._reader is None:
            return
        self._num_uncounted += 1
        self._is_counting = self._reader.phase != "answer"
        if self._reader.has_thought:
            self.num_reasoning += self._num_uncounted
            self._num_uncounted = 0

    def _read(self, text: str) -> None:
        self.text += text
        if self._reader is not None and (self._delivering is None or self._is_counting):
            self._pending.append(self._reader.push(text))

    def whole(self) -> str:
        """Return the text of the answer, without its thinking."""
        return self._split(self.text + self._decoder.kept())[1]

    def parts(self) -> tuple[str, str]:
        """Return the reasoning and the text of the answer when it has ended."""
        return self._split(self.text)

    def _split(self, text: str) -> tuple[str, str]:
        return ("", text) if self._thinking is None else self._thinking.split(text)

    def finish(self) -> None:
        """Append the text that the decoder held back, unless a stop string has ended the text."""
        self._read(self._decoder.flush())

    def take(self, *, is_final: bool) -> tuple[str, str]:
        """Return the new reasoning and text that are certain to be part of the answer."""
        reader = self._reader
        if reader is None or self._delivering is not None:
            end = len(self.text) if is_final else self._num_certain()
            piece = self.text[self._num_shown : end]
            self._num_shown = max(self._num_shown, end)
            if self._delivering is None:
                return "", piece
            reader = self._delivering
            reasoning, text = reader.push(piece)
        else:
            taken, self._pending = self._pending, []
            reasoning, text = ("".join(part[i] for part in taken) for i in (0, 1))
        if is_final:
            more, rest = reader.finish()
            reasoning, text = reasoning + more, text + rest
        return reasoning, text

    def _extend_tail(self, known: str, hidden: str) -> int:
        """Append what a token adds to what is searched; return the length of the tail before."""
        most = max(map(len, self._stops)) - 1
        num_searched = min(len(self._tail), most)
        self._tail = self._tail[len(self._tail) - num_searched :] + known[self._num_known :]
        self._places = self._places[len(self._places) - num_searched :]
        self._places += range(self._num_known, len(known))
        self._num_known = max(self._num_known, len(known))
        if hidden and any(hidden in stop for stop in self._stops):
            self._tail += hidden
            self._places += [len(known)] * len(hidden)
        return num_searched

    def _num_certain(self) -> int:
        """Return the length of the text before the longest suffix that begins a stop string."""
        end, longest = bisect_left(self._places, len(self.text)), 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, end), longest, -1):
                if self._tail.endswith(stop[:length], 0, end):
                    longest = length
                    break
        return self._places[end - longest] if longest else len(self.text)


@final
@dataclass(frozen=True, kw_only=True)
class Piece:
    """New text and tokens of one sample from one step.

    Attributes:
      reasoning: new text of the thinking, which comes before that of the answer.
      num_reasoning: how many of the tokens are thinking.
      logprobs: those of `token_ids`; None if the request did not ask for them.
      estimate: the expected length of the sample when it is new: with the first piece, and after a
        probe has changed it.
      weights_version: of the weights that computed the tokens.
      num_cached_tokens: tokens of the prompt whose KV the sample found in the prefix cache.
    """

    text: str
    token_ids: tuple[int, ...]
    sample_index: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    estimate: LengthEstimate | None = None
    weights_version: int = 0
    num_cached_tokens: int = 0
    reasoning: str = ""
    num_reasoning: int = 0


PieceSink = Callable[[Piece], None]
DecoderFactory = Callable[[], Detokenizer]


@final
@dataclass(frozen=True)
class Weights:
    """The weights of an engine.

    Attributes:
      version: 0 for the initial weights; it increases with every update.
      oldest_kept: the oldest version of the first token of a sample that continues.
    """

    version: int = 0
    oldest_kept: int = 0


@final
class TokenVersions:
    """The versions of the weights that computed the tokens of one sample, stored as changes."""

    def __init__(self, version: int):
        self._starts = [(version, 0)]

    @property
    def newest(self) -> int:
        return self._starts[-1][0]

    def change(self, version: int, num_tokens: int) -> None:
        """Record that other weights compute the tokens after the first `num_tokens`."""
        if self._starts[-1][1] == num_tokens:  # the former version computed none
            self._starts.pop()
        self._starts.append((version, num_tokens))

    def runs(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return (version, number of tokens) of the first `num_tokens` tokens, in their order."""
        ends = [*(start for _, start in self._starts[1:]), num_tokens]
        return tuple(
            (version, min(end, num_tokens) - start)
            for (version, start), end in zip(self._starts, ends, strict=True)
            if start < min(end, num_tokens)
        )


@final
class Answer:
    """The answer to one request: its samples until all have ended, then a completion in `future`.

    The future is resolved exactly once, with a `Completion` also for failed and cancelled requests.
    `sink` is called with the pieces on the engine's thread. It must not block. A sink that raises
    is not called again.
    """

    def __init__(
        self,
        request: Request,
        *,
        decoder: DecoderFactory | None = None,
        sink: PieceSink | None = None,
    ):
        self.request = request
        self.future: Future[Completion] = Future()
        # A cancelled asyncio waiter cannot cancel the future: only `settle` and `fail` resolve it.
        self.future.set_running_or_notify_cancel()
        self.sequences: list[Running] = []
        self._sink = sink
        self._decoder = decoder
        count = request.params.n
        self._assemblers = self._new_assemblers()
        self._num_delivered = [0] * count
        self._num_reasoning = [0] * count
        self._was_cut = [False] * count
        self._reported_end = [False] * count
        self._estimates: list[LengthEstimate | None] = [None] * count
        self._versions: list[TokenVersions] = []

    def begin(self, sequences: list[Running], weights: Weights) -> None:
        self.sequences = sequences
        self._versions = [TokenVersions(weights.version) for _ in sequences]

    def go_on_with(self, weights: Weights, scheduler: Scheduler) -> None:
        """Continue with new weights; nothing is in flight.

        A sample whose first token is of older weights than may be kept ends with an error.
        """
        for sequence, versions in zip(self.sequences, self._versions, strict=True):
            if sequence.phase is Phase.FINISHED or versions.newest == weights.version:
                continue
            runs = versions.runs(len(sequence.output))
            if runs and runs[0][0] < weights.oldest_kept:
                scheduler.end(sequence, "error", _stale(sequence, runs[0][0], weights))
                self._emit(sequence, [])
            else:
                versions.change(weights.version, len(sequence.output))

    def expect(self, prediction: LengthPrediction, scheduler: Scheduler) -> None:
        """Set a prediction that arrives after the submission; call it on the engine's thread."""
        if self.request.prediction is None:
            self.request = replace(self.request, prediction=prediction)
        for sequence in self.sequences:
            scheduler.expect(sequence, prediction)

    @property
    def waits(self) -> bool:
        """Whether no sample has had a slot yet, and the request has not ended; on any thread."""
        has_begun = any(each.times.admitted_s is not None for each in self.sequences)
        return not (has_begun or self.future.done())

    def restart(self, scheduler: Scheduler) -> None:
        """Compute the samples again; drop their tokens, unless a sink has some or one has ended."""
        has_shown = self._sink is not None and any(self._num_delivered)
        keeps_output = has_shown or any(each.phase is Phase.FINISHED for each in self.sequences)
        for sequence in self.sequences:
            scheduler.restart(sequence, keeps_output=keeps_output)
        if not keeps_output:
            self._num_delivered = [0] * len(self._num_delivered)
            self._num_reasoning = [0] * len(self._num_reasoning)
            self._versions = [TokenVersions(versions.newest) for versions in self._versions]
            self._assemblers = self._new_assemblers()

    def deliver(self, sequence: Running, scheduler: Scheduler) -> None:
        """Deliver the new tokens of `sequence`, and end it when a stop string is complete."""
        i = sequence.sample_index
        new = sequence.output[self._num_delivered[i] :]
        if self._assemblers and not self._was_cut[i]:
            used = self._assemblers[i].push(_without_stop_token(sequence, new))
            if used is not None:
                self._cut(sequence, self._num_delivered[i] + used, scheduler)
                new = new[:used]
        self._num_delivered[i] += len(new)
        if sequence.phase is Phase.FINISHED and sequence.finish_reason == "stop":
            self._validate(sequence, scheduler)
        self._emit(sequence, new, self._new_estimate(sequence, scheduler))

    def settle(self, keep: Callable[[Request, Completion], None]) -> bool:
        """Return whether every sample has ended; if so, call `keep`, then resolve the future."""
        if any(sequence.phase is not Phase.FINISHED for sequence in self.sequences):
            return False
        for sequence in self.sequences:
            self._emit(sequence, [])
        if not self.future.done():
            completion = self._completion()
            keep(self.request, completion)
            self.future.set_result(completion)
        return True

    def fail(self, error: JaxserveError, now_s: float) -> None:
        """End the request with `error` and without output, because the engine failed."""
        timing = Timing(arrival_s=self.request.arrival_s, finished_s=now_s)
        if not self.future.done():
            self.future.set_result(
                failed_completion(self.request.id, self.request.given_prompt, error, timing)
            )
        self._notify(Piece(text="", token_ids=(), finish_reason="error"))

    def _new_assemblers(self) -> list[TextAssembler]:
        if self._decoder is None:
            return []
        params = self.request.params
        thinking = self.request.thinking
        if not isinstance(thinking, Thinking) or params.separate_reasoning is False:
            thinking = None
        return [
            TextAssembler(self._decoder(), params.stop, params.min_tokens, thinking)
            for _ in range(params.n)
        ]

    def _validate(self, sequence: Running, scheduler: Scheduler) -> None:
        """Fail a sample that has matched its grammar unless its schema agrees."""
        i, grammar = sequence.sample_index, self.request.grammar
        if not isinstance(grammar, CompiledGrammar) or grammar.schema is None or self._was_cut[i]:
            return
        answer, thinking = self._assemblers[i].whole(), self.request.thinking
        if self.request.params.separate_reasoning is False and isinstance(thinking, Thinking):
            _, answer = thinking.split(answer)
        problem = grammar.schema.problem(answer)
        if problem is not None:
            error = GrammarFailedError(
                f"the answer does not validate against its json_schema ({problem}), although "
                "llguidance let it pass; write that part of the schema in another way, and report "
                "it with the schema"
            )
            scheduler.stop_at(sequence, len(sequence.output), error)

    def _cut(self, sequence: Running, num_tokens: int, scheduler: Scheduler) -> None:
        self._was_cut[sequence.sample_index] = True
        scheduler.stop_at(sequence, num_tokens)

    def _new_estimate(self, sequence: Running, scheduler: Scheduler) -> LengthEstimate | None:
        if self._sink is None:
            return None
        known = self._estimates[sequence.sample_index]
        newest = scheduler.lengths.estimate(sequence)
        if newest is None and known is None and self.request.prediction is not None:
            newest = LengthEstimate(self.request.prediction)  # it has ended with its first piece
        if newest is None or newest is known:
            return None
        self._estimates[sequence.sample_index] = newest
        return newest

    def _emit(
        self, sequence: Running, new: Sequence[int], estimate: LengthEstimate | None = None
    ) -> None:
        i = sequence.sample_index
        ended = sequence.phase is Phase.FINISHED
        if self._reported_end[i]:
            return
        if ended and self._assemblers and not self._was_cut[i]:
            self._assemblers[i].finish()
        self._reported_end[i] = ended
        if self._sink is None:
            return
        reasoning = text = ""
        num_reasoning = 0
        if self._assemblers:
            reasoning, text = self._assemblers[i].take(is_final=ended)
            num_known = self._assemblers[i].num_reasoning
            num_reasoning = num_known - self._num_reasoning[i]
            self._num_reasoning[i] = num_known
        reason = sequence.finish_reason if ended else None
        if text or reasoning or new or ended:
            self._notify(
                Piece(
                    text=text,
                    token_ids=tuple(new),
                    sample_index=i,
                    finish_reason=reason,
                    logprobs=self._logprobs(sequence, len(new)),
                    estimate=estimate,
                    weights_version=self._versions[i].newest,
                    num_cached_tokens=sequence.kv.num_found,
                    reasoning=reasoning,
                    num_reasoning=num_reasoning,
                )
            )

    def _logprobs(self, sequence: Running, num_new: int) -> tuple[TokenLogprob, ...] | None:
        if self.request.params.logprobs is None:
            return None
        end = self._num_delivered[sequence.sample_index]
        return tuple(sequence.scores.output[end - num_new : end])

    def _notify(self, piece: Piece) -> None:
        if self._sink is None:
            return
        try:
            self._sink(piece)
        except Exception:  # a sink's error must not reach the engine
            _log.exception("the sink of %s failed; it gets no more pieces", self.request.id)
            self._sink = None

    def _completion(self) -> Completion:
        first = self.sequences[0]
        wants_prompt = self.request.params.prompt_logprobs is not None
        positions = range(len(self.request.prompt))
        return Completion(
            request_id=self.request.id,
            prompt_token_ids=self.request.given_prompt,
            samples=tuple(self._sample(sequence) for sequence in self.sequences),
            timing=_timing(self.request, self.sequences),
            prompt_logprobs=tuple(first.scores.prompt.get(p) for p in positions)
            if wants_prompt
            else None,
            conversation_id=self.request.conversation_id,
            predicted_tokens=_predicted_tokens(self.request),
            num_cached_tokens=first.kv.num_found,
            pooled=None if first.pooled is None else first.pooled.mean,
            error=next((s.error for s in self.sequences if s.error is not None), None),
        )

    def _sample(self, sequence: Running) -> Sample:
        assert sequence.finish_reason is not None
        i = sequence.sample_index
        reasoning, text = self._assemblers[i].parts() if self._assemblers else ("", "")
        return Sample(
            text=text,
            token_ids=tuple(sequence.output),
            finish_reason=sequence.finish_reason,
            logprobs=tuple(sequence.scores.output)
            if self.request.params.logprobs is not None
            else None,
            version_runs=self._versions[i].runs(len(sequence.output)),
            reasoning=reasoning or None,
            num_reasoning_tokens=self._assemblers[i].num_reasoning if self._assemblers else 0,
        )


@final
class OpenAnswers:
    """The open answers of an engine. Only the engine's thread uses it.

    `on_ended` is called with each request that began and has ended, before its future is resolved.
    """

    def __init__(self, scheduler: Scheduler, on_ended: Callable[[Request, Completion], None]):
        self._scheduler = scheduler
        self._on_ended = on_ended
        self._open: dict[str, Answer] = {}
        self._by_sequence: dict[int, Answer] = {}

    def begin(self, answer: Answer, sequences: list[Running], weights: Weights) -> None:
        self._open[answer.request.id] = answer
        self._by_sequence.update((sequence.key, answer) for sequence in sequences)
        answer.begin(sequences, weights)
        for sequence in sequences:
            if sequence.output:  # forced by a grammar before any step
                answer.deliver(sequence, self._scheduler)
        self._settle(answer)

    def deliver(self, all_news: Iterable[Progress]) -> None:
        """Deliver new tokens; sequences without an answer are left out."""
        if not self._open:
            return
        touched: dict[str, Answer] = {}
        # First tokens go first: a user waits for each, and may not notice a later one's delay.
        for news in sorted(all_news, key=lambda each: len(each.sequence.output) > each.num_new):
            answer = self._by_sequence.get(news.sequence.key)
            if answer is not None:
                answer.deliver(news.sequence, self._scheduler)
                touched[answer.request.id] = answer
        for answer in touched.values():
            self._settle(answer)

    def cancel(self, request_id: str) -> None:
        """End a request with its present output; do nothing if it has ended or is unknown."""
        answer = self._open.get(request_id)
        if answer is not None:
            for sequence in answer.sequences:
                self._scheduler.end(sequence, "cancelled")
            self._settle(answer)

    def cancel_all(self) -> None:
        for request_id in list(self._open):
            self.cancel(request_id)

    def restart(self) -> None:
        """Start every request again, except that what was shown or has ended is kept."""
        for answer in self._open.values():
            answer.restart(self._scheduler)

    def go_on_with(self, weights: Weights) -> None:
        """Continue with these weights, which may be new; nothing is in flight."""
        for answer in list(self._open.values()):
            answer.go_on_with(weights, self._scheduler)
            self._settle(answer)

    def fail(self, error: JaxserveError, not_begun: Sequence[Answer], now_s: float) -> None:
        """End every answer with an error, also those that have not begun or failed to begin."""
        for answer in (self._open | {each.request.id: each for each in not_begun}).values():
            answer.fail(error, now_s)

    def _settle(self, answer: Answer) -> None:
        if answer.settle(self._on_ended):
            for sequence in answer.sequences:
                del self._by_sequence[sequence.key]
            del self._open[answer.request.id]


def _stale(sequence: Running, version: int, weights: Weights) -> StaleWeightsError:
    return StaleWeightsError(
        f"request {sequence.request.id}: its first tokens are of weights version {version}, and "
        f"the update to version {weights.version} keeps version {weights.oldest_kept} or newer. "
        "Submit it again, or pass a larger max_staleness to update_params"
    )


def _predicted_tokens(request: Request) -> int | None:
    if request.prediction is None:
        return None
    most = request.params.max_tokens
    expected = request.prediction.expected_length
    return expected if most is None else min(expected, most)


def failed_completion(
    request_id: str, prompt: tuple[int, ...], error: JaxserveError, timing: Timing
) -> Completion:
    sample = Sample(text="", token_ids=(), finish_reason="error")
    return Completion(
        request_id=request_id,
        prompt_token_ids=prompt,
        samples=(sample,),
        timing=timing,
        error=error,
    )


def _without_stop_token(sequence: Running, new: list[int]) -> list[int]:
    """Return `new` without a final stop token, which is not part of the answer's text."""
    ended_by_token = new and new[-1] in sequence.request.stop_token_ids
    return new[:-1] if ended_by_token else new


def _timing(request: Request, sequences: Sequence[Running]) -> Timing:
    def earliest(times: list[float | None]) -> float | None:
        return min((t for t in times if t is not None), default=None)

    ends = [s.times.finished_s for s in sequences if s.times.finished_s is not None]
    return Timing(
        arrival_s=request.arrival_s,
        admitted_s=earliest([s.times.admitted_s for s in sequences]),
        first_token_s=earliest([s.times.first_token_s for s in sequences]),
        finished_s=max(ends, default=None),
        num_preemptions=sum(s.num_preemptions for s in sequences),
    )
