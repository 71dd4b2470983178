"""The facade, which owns a model, its memory and the loops that serve it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, final

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.conversations import Conversations
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError, ProcessGroupError
from jaxserve.core.options import RuntimeKeywords, RuntimeOptions, parse_dtype
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import PieceSink
from jaxserve.engine.loop import Running
from jaxserve.engine.pending import Pending, PromptBatch
from jaxserve.engine.requests import Prompt
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.memory.page_cache import Tier
from jaxserve.models.decoder import Decoder
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.planning.schedules.schedule import LatencyBounds
from jaxserve.planning.step_times import GroupTimes, StepTimes
from jaxserve.report import Report
from jaxserve.runtime.build import build_parts, with_token_options
from jaxserve.runtime.loading import load_for
from jaxserve.runtime.planner import MAX_PAUSE_S
from jaxserve.runtime.pooling import Classification, Ranked, as_reranker, classify, embed, rerank
from jaxserve.runtime.scoring import score
from jaxserve.runtime.service import Service
from jaxserve.runtime.stats import RuntimeStats
from jaxserve.runtime.status import StatusLog, log_start
from jaxserve.runtime.weight_update import KV, PreparedParams, WeightUpdate
from jaxserve.scheduling.bounds import Outlook
from jaxserve.scheduling.kv.transfer import KVPages
from jaxserve.sharding import DeviceGroups, StagePlan
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.predictor import OnlineLearner


@final
class Runtime(Service):
    """A `Service` that serves one model in this process; `Service` documents its methods.

    On a mesh over several processes (`sharding.join`) each process creates the runtime with the
    same arguments. Process 0 leads: its runtime answers. The others call `follow`.

    Methods that need the engine raise RuntimeClosedError after `close`, and EngineFailedError after
    the engine has failed; they list these errors only where there is more to say.

    Args:
      model: a Flax NNX decoder (`jaxserve.models`), with parameters or abstract ones.
      params: the parameters as an `nnx.State`, shared and not copied; by default the model's.
      tokenizer: the model's tokenizer; None restricts prompts and completions to token ids.
      eos_token_ids: end tokens; by default the tokenizer's.
      mesh: the mesh to shard the model over (`sharding.make_mesh`), or a `sharding.StagePlan` to
        cut it into stages, or `sharding.DeviceGroups` to compute prompts and answers on separate
        devices (`sharding.make_groups`); by default the devices of the parameters. Parameters that
        are already placed by the rules of `sharding` are not copied. Each index of the mesh's
        `data` axis is a replica with its own engine.
      wrap_executor: function for tests and measurements. It gets the executor of every replica
        after its warm-up and returns the executor that the engine drives and closes instead.
      options: the fields of `RuntimeOptions`.

    Raises:
      InvalidConfigError: an option is not allowed, or the mesh cannot divide the model or omits
        some of the job's processes.
      DeviceMemoryError: the device has too little memory.
      JournalError: the journal of conversations cannot be used.
      ProcessGroupError: the processes already serve another model, or some have left.
    """

    recovers = False

    def __init__(
        self,
        model: nnx.Module,
        params: nnx.State | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
        mesh: Mesh | StagePlan | DeviceGroups | None = None,
        wrap_executor: Callable[[ModelExecutor], ModelExecutor] | None = None,
        **options: Unpack[RuntimeKeywords],
    ):
        self.options = RuntimeOptions.parse(options)
        if not isinstance(model, Decoder):
            raise InvalidConfigError(
                f"Runtime serves a jaxserve.models.decoder.Decoder, and got {_described(model)}; "
                "docs/own_model.md shows how a model of your own becomes one, and "
                "Runtime.from_pretrained loads a name, a folder or a file"
            )
        tokenizer, eos_token_ids = with_token_options(
            tokenizer, eos_token_ids, self.options, model.config.vocab_size
        )
        if self.options.reranker is not None:
            model = as_reranker(model, tokenizer)
        parts = build_parts(
            model, params, tokenizer, eos_token_ids, mesh, self.options, wrap_executor
        )
        self.model_config = model.config
        self._tokenizer = tokenizer
        self._layer_layout = model.layer_layout
        self._source: Path | None = None
        self._conversations = parts.conversations
        self._replicas = parts.replicas
        self._adapters = parts.adapters
        self._updater = parts.updater
        self._planner = parts.planner
        self._intake = parts.intake
        self._forecaster = parts.forecaster
        self._weights_bytes = parts.weights_bytes
        # Closes a runtime that is dropped without `close`, as in notebooks.
        self._finalizer = weakref.finalize(self, parts.close)
        if parts.group is not None:
            parts.group.before_leaving(self._finalizer)
        parts.start()
        log_start(self.model_config, self._replicas, self._weights_bytes)
        status = StatusLog(self._replicas)
        parts.opened.callback(status.close)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        revision: str | None = None,
        load: Literal["auto", "random"] = "auto",
        dtype: str | None = None,
        mesh: Mesh | StagePlan | DeviceGroups | None = None,
        wrap_executor: Callable[[ModelExecutor], ModelExecutor] | None = None,
        **options: Unpack[RuntimeKeywords],
    ) -> Runtime:
        """Create a runtime for a model by its name, from a Hugging Face folder or a GGUF file.

        `mesh`, `wrap_executor` and `options` are the arguments of `Runtime`. Weights are read
        directly onto their shards.

        Args:
          name_or_path: a registered name, a path, or a name of the Hugging Face Hub: `org/name`,
            `org/name@revision`, or `org/name:Q4_K_M` for a GGUF file. Missing files are downloaded
            into the Hub's cache.
          revision: a branch, tag or commit of the Hub.
          load: "random" draws random weights for the folder's config.json and reads no weights.
          dtype: "float32", "bfloat16" or "float16", also as "bf16" and the like; the platform's by
            default and for "auto". Weights of a GGUF file, or of a folder in bfloat16, are then in
            bfloat16 on one CPU that multiplies such numbers, and so are keys and values, as with
            quantize="bf16" and kv_dtype="bfloat16"; "float32" has both in float32.

        Raises:
          UnknownModelError, UnsupportedModelError, CheckpointError, DownloadError, ModelCacheError,
            InvalidConfigError, DeviceMemoryError, JournalError
        """
        if revision is not None:
            from jaxserve.models.registry import at_revision

            name_or_path = at_revision(name_or_path, revision)
        loaded = load_for(
            RuntimeOptions.parse(options),
            name_or_path,
            load=load,
            dtype=parse_dtype(dtype),
            mesh=mesh,
        )
        made = cls(
            nnx.merge(loaded.graphdef, loaded.params),
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            mesh=mesh,
            wrap_executor=wrap_executor,
            **options,
        )
        made._source = loaded.source_path
        return made

    # ---- several processes ----

    @property
    def is_leader(self) -> bool:
        """Whether this process answers: process 0 of several, or the only process."""
        group = self._replicas.group
        return group is None or group.is_leader

    def follow(self) -> None:
        """Take part in the leader's steps. Call it on every process except the leader.

        It returns when the leader closes its runtime or calls `dismiss_followers`. During the call
        only the leader reacts to Ctrl-C. If any process dies, this process ends too.

        Raises:
          ProcessGroupError: this process leads.
          RuntimeClosedError: the leader has already closed its runtime.
        """
        if self._replicas.group is None:
            raise ProcessGroupError(
                "this process serves the model alone, so there is no leader to follow; call "
                "follow() only on processes where rt.is_leader is false"
            )
        self._replicas.group.follow()

    def dismiss_followers(self) -> None:
        """End `follow` on the other processes when all requests have ended. Call it on the leader.

        Call it before work that all processes share, such as a training step and `update_params`.
        Requests that are submitted afterwards wait until the others follow again. It does nothing
        if this process is the only one.

        Raises:
          ProcessGroupError: this process follows.
        """
        self._replicas.dismiss_followers()

    # ---- answers: see `Service` ----

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        conversation_id: str | None = None,
        on_piece: PieceSink | None = None,
    ) -> Pending[Completion]:
        return self._intake.submit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            conversation_id=conversation_id,
            on_piece=on_piece,
        )

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, a text or a chat, as `submit` makes them.

        Raises:
          InvalidRequestError: the prompt cannot be served; one of its subclasses.
          MissingExtraError: a package that the prompt needs is not installed.
        """
        return self._intake.prompt_tokens(prompt)

    def submit_items(self, items: Sequence[WorkloadItem]) -> list[Pending[Completion]]:
        """Submit workload requests that arrive now; a replica starts its share in one iteration.

        Raises:
          InvalidRequestError: an item cannot be served, so none is submitted; one of its
            subclasses.
        """
        return self._intake.submit_items(items)

    def encode(self, prompts: Any) -> Any:
        """Return the encoder's output for one prompt, or a batch, of an encoder-decoder model.

        Steps of running requests run between the encoder's. Nothing is cached.

        Args:
          prompts: a prompt or a list of prompts, as in `generate`; each at most
            `config.max_prompt_tokens` tokens, with those that the tokenizer adds.

        Returns:
          float32 [tokens, hidden_size] for a prompt, after the encoder's last norm; a list of
            arrays for a list.

        Raises:
          UnsupportedModelError: the model has no encoder.
          InvalidRequestError: a prompt cannot be encoded, so none is; one of its subclasses.
          ProcessGroupError: several processes serve the model.
        """
        return self._intake.encode(prompts)

    def score(
        self, sequences: Any, params: SamplingParams | None = None, *, progress: bool = False
    ) -> Any:
        """Return the log-probability of each token of some sequences, given the tokens before it.

        A prompt with its answer gets the numbers that sampling reported: the same bits where
        serving is deterministic (docs/batch_invariance.md), otherwise within rounding. Sequences
        run in steps with other requests, and use no cached pages.

        Args:
          sequences: a sequence or a list of sequences, as prompts in `generate`; usually token ids.
            Each is at most `max_length` - 1 tokens.
          params: None for `TokenLogprob.logprob`, which is the model's own. Otherwise for
            `TokenLogprob.processed_logprob`, of tokens drawn with these parameters. Their
            temperature, truncation, `repetition_penalty`, `logit_bias` and `adapter` count;
            lengths, stops and seeds do not.
          progress: show a bar when it takes over two seconds.

        Returns:
          float32 [tokens - 1] for a sequence, without the first token; a list of arrays for a list.

        Raises:
          InvalidSamplingParamsError: `params` are greedy, have a grammar or `min_tokens`, or count
            output tokens apart from the prompt's (`presence_penalty`, `frequency_penalty`).
          InvalidRequestError: a sequence cannot be scored, so none is; one of its subclasses.
          QueueFullError: more sequences than `max_waiting` would wait.
        """
        return score(self._intake, sequences, params, progress=progress)

    def embed(
        self,
        texts: Any,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Return the embeddings of some texts, as the files of the model say (docs/embeddings.md).

        Without sentence-transformers' files it is the hidden state of a text's last token after the
        last norm, normalised. Texts run in steps with other requests, long ones in several.

        Args:
          texts: a text or a list of texts, as prompts in `generate`; each at most `max_length`
            tokens, with those that the tokenizer adds.
          normalize: whether embeddings have length 1; by default as the model's files say.
          dimensions: leading numbers of each embedding to keep, for models that were trained for it
            (Matryoshka); by default all.
          adapter: name of a loaded adapter.
          progress: show a bar when it takes over two seconds; `options.progress` by default.

        Returns:
          float32 [texts, dimensions] for a list; [dimensions] for one text.

        Raises:
          OtherTaskError: the model is a classifier or an encoder-decoder.
          InvalidRequestError: a text cannot be embedded, so none is; one of its subclasses.
          QueueFullError: more texts than `max_waiting` would wait.
        """
        show = self.options.progress if progress is None else progress
        return embed(
            self._intake,
            self.model_config,
            texts,
            normalize=normalize,
            dimensions=dimensions,
            adapter=adapter,
            progress=show,
        )

    def classify(
        self, texts: Any, *, adapter: str | None = None, progress: bool | None = None
    ) -> Classification:
        """Return the logits and probabilities of a classifier's labels, or rewards, for some texts.

        Args:
          texts: a text or a list of texts, as prompts in `generate`; a chat is rendered without the
            beginning of an answer.
          adapter, progress: as in `embed`.

        Returns:
          Arrays [texts, labels] for a list; [labels] for one text.

        Raises:
          OtherTaskError: the model has no labels.
          InvalidRequestError: a text cannot be classified, so none is; one of its subclasses.
          QueueFullError: more texts than `max_waiting` would wait.
        """
        show = self.options.progress if progress is None else progress
        return classify(self._intake, self.model_config, texts, adapter=adapter, progress=show)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        adapter: str | None = None,
        progress: bool | None = None,
    ) -> list[Ranked]:
        """Return documents by their relevance to a query, the most relevant first.

        Args:
          top_n: maximum number of documents to return; by default all.
          instruction: the task, for a model whose prompt has one; by default a search of the web.
          adapter, progress: as in `embed`.

        Raises:
          OtherTaskError: the model is not a reranker.
          InvalidRequestError: a pair cannot be scored, so none is; one of its subclasses.
          QueueFullError: more documents than `max_waiting` would wait.
        """
        show = self.options.progress if progress is None else progress
        return rerank(
            self._intake,
            self.model_config,
            self.tokenizer,
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            adapter=adapter,
            progress=show,
        )

    def cancel(self, request_id: str) -> None:
        self._replicas.cancel(request_id)

    @property
    def conversations(self) -> Conversations:
        self._replicas.check_leads()
        return self._conversations

    # ---- weights, and pauses while they come ----

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next steps compute with; 0 at first."""
        return self._updater.weights.version

    def prepare_params(
        self, params: nnx.Module | nnx.State, *, partial: bool = False
    ) -> PreparedParams:
        """Check new weights, and place them on the devices in addition to the present ones.

        Requests run meanwhile. `update_params` of the result then moves no array, unless the
        weights or their devices have changed in between. The new weights take memory until the
        result is dropped, or other weights have replaced them. Arguments are those of
        `update_params`.

        Raises:
          InvalidParamsError: the parameters do not fit, or have NaN or infinite numbers.
          DeviceMemoryError: the device has no room for them.
        """
        return self._updater.prepare(params, partial=partial)

    def update_params(
        self,
        params: nnx.Module | nnx.State | PreparedParams,
        *,
        version: int | None = None,
        running: Running | None = None,
        kv: KV = "recompute",
        partial: bool = False,
        max_staleness: int | None = None,
    ) -> int:
        """Replace the weights for all later steps, for instance by those of a trainer.

        Arrays on the same devices in the same dtypes are shared and not copied; all other arrays
        are copied there and cast. No step is compiled. The runtime drops its references to the old
        arrays, and no longer finds cached pages of the old weights. After an error the old weights
        continue to serve, unless it is an EngineFailedError. If several processes serve the model,
        all of them call it while none follows (`dismiss_followers`). `docs/promises/rollouts.md`
        says what is guaranteed.

        Args:
          params: a model, or its parameters, of the same structure and shapes; or the parameters
            that have changed; or the result of `prepare_params`.
          version: number of the new weights, above the present one; by default the next number.
            `Sample.weights_versions` has it for each token.
          running: treatment of the requests that were submitted before. "finish", the default,
            waits until they have ended with the old weights. "keep", the default while the runtime
            is paused, continues them with the new weights, and "abort" cancels them. "restart"
            starts them again with the new weights, except that a request that has sent tokens to a
            stream, or has ended one of its samples, continues as with "keep". Requests that are
            submitted during the call wait, or run on a replica that is not paused yet.
          kv: treatment of the KV of requests that continue. "recompute" computes it anew from their
            tokens. "keep", only with running="keep", continues with the KV of the old weights.
          partial: whether `params` lacks the parameters that have not changed; ignored for prepared
            ones.
          max_staleness: a sample that continues ends with StaleWeightsError if the weights of its
            first token are more than this number of versions older; None for no bound.

        Returns:
          The version of the new weights.

        Raises:
          InvalidParamsError: the parameters do not fit, or have NaN or infinite numbers, also after
            a cast to the model's dtype.
          InvalidConfigError: another argument is not allowed.
          DeviceMemoryError: the device has no room for both the new and the old ones.
          EngineBusyError: running="finish" while the runtime is paused.
          EngineFailedError: the engine has failed, or a failed update could not be undone; the
            runtime no longer serves.
        """
        if running is None:
            running = "keep" if self._replicas.are_paused else "finish"
        update = WeightUpdate(
            version=version, running=running, kv=kv, partial=partial, max_staleness=max_staleness
        )
        return self._updater.update(params, update)

    def save_pretrained(
        self, folder: str | Path, *, like: str | Path | Mapping[str, Any] | None = None
    ) -> None:
        """Write the present weights as a Hugging Face folder, which transformers loads too.

        It has config.json, safetensors and the tokenizer's files, and appears when it is complete.
        Requests run meanwhile. Adapters are not part of it (`jaxserve.merge_adapter`).

        Args:
          folder: a path that does not exist, or an empty folder.
          like: where the fields of config.json and the other files come from: a folder, a GGUF
            file, or the fields as a dictionary. By default the place that `from_pretrained` read;
            needed if the runtime was made of a model.

        Raises:
          InvalidConfigError: the folder has files, `like` is needed, the weights were dropped
            (`sleep`), or they are in stages or on several processes.
          UnsupportedModelError: the weights are in few bits.
        """
        like = self._source if like is None else like
        if like is None:
            raise InvalidConfigError(
                "this runtime was made of a model, so that there is no config.json to take fields "
                "from; pass like= the fields as a dictionary, or a folder that has them"
            )
        self._updater.save_pretrained(
            folder, self.model_config, self._layer_layout, like, self.tokenizer
        )

    def pause(self, running: Running = "keep") -> None:
        """Run no step from now on, until `resume`; return when the last one has ended.

        Requests can be submitted and cancelled meanwhile; calls that wait for answers wait for
        `resume`. `update_params` works in a pause. A second pause with "keep" has no effect.

        Args:
          running: treatment of the requests that were submitted before. "keep" halts them, and they
            continue with the same tokens. "finish" waits for their end. "abort" and "restart" are
            as in `update_params`.

        Raises:
          InvalidConfigError: `running` is unknown.
          EngineBusyError: running="finish" while the runtime is paused.
          ProcessGroupError: this process follows.
        """
        self._replicas.pause(running)

    def resume(self) -> None:
        """Run steps again after `pause`; do nothing without a pause.

        Raises:
          EngineBusyError: the runtime is asleep; call `wake_up`.
        """
        self._replicas.resume()

    def sleep(self, *, drops_weights: bool = False) -> None:
        """Pause, and free the memory of the page pool until `wake_up`, for a training step.

        Requests are accepted meanwhile, and wait. Running requests keep their tokens, and their KV
        is recomputed. Executables stay, so that nothing compiles for the steps after `wake_up`.
        Cached pages on the device and the host are dropped, and those on disk are kept.

        Args:
          drops_weights: also drop the references to the weights, which frees their memory unless
            the caller holds the arrays. `update_params` is needed before `wake_up`.

        Raises:
          InvalidConfigError: several processes or two groups of devices serve the model.
        """
        self._replicas.sleep(drops_weights=drops_weights)

    def wake_up(self) -> None:
        """Allocate the page pool again after `sleep`, and resume.

        Raises:
          DeviceMemoryError: there is too little memory; the runtime stays asleep.
          InvalidConfigError: the weights were dropped and not replaced.
        """
        self._replicas.wake_up()

    # ---- adapters ----

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._adapters.names

    def load_adapter(
        self, name: str, source: str | Path | Mapping[str, Any], *, scale: float | None = None
    ) -> None:
        """Load an adapter (LoRA), for requests that name it.

        Requests run meanwhile. No step is compiled.

        Args:
          source: a folder of PEFT, with `adapter_config.json` and `adapter_model.safetensors`; or
            arrays by PEFT's names, `...lora_A.weight` [rank, in] and `...lora_B.weight` [out,
            rank].
          scale: factor of B @ A, for arrays; a folder has its own.

        Raises:
          InvalidParamsError: the adapter does not fit the model or `max_adapter_rank`, has NaN or
            infinite numbers, or is of a kind that is not served. Nothing has changed.
          InvalidConfigError: the name is taken, or `max_adapters` adapters are loaded.
          EngineBusyError: the runtime is asleep.
          DeviceMemoryError: there is no room for a copy of an eighth of the adapters' memory. The
            present adapters continue to serve.
        """
        self._adapters.load(name, source, scale)

    def adapter_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the arrays of an adapter that changes all weights it may.

        An adapter may have only some of them. Empty for a runtime without adapters.
        """
        return self._adapters.shapes(rank)

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter, which frees its name and its place. It works during `sleep` too.

        Raises:
          UnknownAdapterError: no adapter has this name.
          EngineBusyError: requests with this adapter have not ended; it stays.
        """
        self._adapters.drop(name)

    # ---- cached pages ----

    def residency(self, token_ids: Sequence[int]) -> list[Tier]:
        """Return the tier that holds the KV of each full page of a context at present.

        With several replicas, it is that of the replica that holds most of the context.
        `jaxserve.report.draw_residency` draws it.
        """
        return self._replicas.residency(token_ids)

    def forget_kept_pages(self) -> None:
        """Drop all cached pages, so that later requests compute their prompts; for measurements.

        A runtime that speculates also drops past answers, which it would propose.
        """
        self._replicas.forget_kept_pages()

    def export_kv(self, token_ids: Sequence[int], first: int = 0, *, waits: bool = True) -> KVPages:
        """Return the KV of the leading full pages of a context that are cached, for `import_kv`.

        For a prompt that was just answered these are all full pages, if the policy keeps pages and
        host memory has room for them; they pass through it. Without room there are fewer.

        Args:
          first: index of the first page to return; `import_kv` needs all pages from 0 on.
          waits: False to return only pages that are on the host, without waiting. The next steps
            copy the missing ones, so that a prompt's pages can be read while it is computed.

        Raises:
          ProcessGroupError: several processes serve the model.
        """
        return self._replicas.export_kv(token_ids, first, waits=waits)

    def import_kv(self, token_ids: Sequence[int], kv: KVPages) -> int:
        """Cache KV that another runtime of the same model and options exported.

        The next request that begins with these tokens finds it, unless it is evicted before. Return
        the number of pages for which host memory has room.

        Raises:
          InvalidConfigError: the KV comes from a runtime with other weights or sizes.
          ProcessGroupError: several processes serve the model.
        """
        return self._replicas.import_kv(token_ids, kv)

    # ---- step times and plans ----

    def plan(
        self,
        latency_bound: float | None = None,
        *,
        first_token_bound: float | None = None,
        token_bound: float | None = None,
        lengths: Sequence[tuple[int, int]] | np.ndarray | None = None,
        adopt: bool = True,
        adapt: bool = True,
        max_wait_s: float = 60.0,
        max_pause_s: float = MAX_PAUSE_S,
        policies: Sequence[str] | None = None,
    ) -> SchedulePlan:
        """Find the schedule with the most throughput under latency bounds, and serve by it.

        The schedule is one of two families: continuous batching with at most B running sequences,
        or round-robin allocation (RRA) of ExeGPT, which encodes B_E prompts, decodes N_D
        iterations, and so on (sections 4.1 and 5.1 of the paper). On two device groups it is
        workload-aware allocation (WAA), with the sizes of its batches and steps, and with the
        division of the devices between the groups that serves the most, if a move pays (`Move`);
        under policies "exegpt_waa_c" and "exegpt_waa_m", of those that the paper's rules give. No
        request is lost by the change, and greedy answers keep their tokens. Only a move of devices
        preempts. Except for that only the iteration shape changes; the policy's admission, order,
        retention and preemption stay. Each replica adopts the same schedule, and the plan's figures
        are those of one replica.

        The first call measures step times, unless the cache folder has them, or they were measured
        or loaded before (`measure_step_times`, `load_step_times`, and the same of groups). It waits
        for the end of the running requests, for at most `max_wait_s`, and then measures for up to
        minutes. Requests that are submitted meanwhile start after it.
        `docs/promises/latency_bounds.md` says what a plan does not cover.

        Args:
          latency_bound: seconds that an answer of the 99th-percentile length may take from its
            admission to its end, without its time in the queue; None or `math.inf` for no bound.
          first_token_bound: seconds from its admission to its first token, likewise.
          token_bound: mean seconds per token after the first, likewise.
          lengths: pairs of prompt and output tokens of answers; by default those of the newest
            answers of this runtime.
          adopt: False to compute the plan only.
          adapt: search again when the lengths of the newest answers differ from those of the plan
            (`planning.schedules.adaptation`), and adopt the result. If no schedule keeps a bound
            any longer, it is exceeded as little as possible, and a warning says so. False to keep
            the schedule until the next call.
          max_wait_s: seconds to wait for the end of running requests, if step times must be
            measured.
          max_pause_s: seconds for which moving devices between two groups may pause the engine, now
            and when the plan is adapted. If a longer pause is expected, the devices stay, and
            `plan.move` says so. 0 to keep the groups.
          policies: families to choose from: "rra" and "continuous"; or on two device groups "waa",
            which compares every division of the devices, or "waa_c" and "waa_m", which have those
            that equal shares of computation and of memory give. By default all that the runtime can
            run, and under a policy of the paper, such as "exegpt_rra", that one alone.

        Raises:
          EngineBusyError: requests ran for longer than `max_wait_s`. They continue, and nothing was
            measured.
          InfeasibleBoundError: no schedule keeps the bounds; `lowest` has the lowest feasible ones.
            The present schedule stays.
          InvalidConfigError: no answer has ended yet and `lengths` is missing, or an argument is
            not allowed.
          DeviceMemoryError: one answer of such lengths is expected to exceed the page pool.
          ProcessGroupError: this process follows.
        """
        bounds = LatencyBounds.of(latency_bound, first_token_bound, token_bound)
        _check_limit("max_wait_s", max_wait_s)
        _check_limit("max_pause_s", max_pause_s)
        return self._planner.plan(
            bounds,
            lengths,
            adopt=adopt,
            adapt=adapt,
            max_wait_s=max_wait_s,
            max_pause_s=max_pause_s,
            policies=policies,
        )

    def regroup(self, *, encode: int, decode: int, max_pause_s: float = MAX_PAUSE_S) -> float:
        """Move devices between the group for prompts and the group for answers.

        Running requests keep their tokens, and their KV is recomputed. Executables are made before
        the pause, in which weights are placed. A plan in force is dropped, and its schedule stays.
        If it was adapted, the next answers make a plan for these groups, which no longer moves
        devices; `plan` moves devices by itself. Return the seconds for which no step ran.

        Args:
          encode, decode: number of devices of each group, of those that the runtime has.
          max_pause_s: seconds for which the engine may pause.

        Raises:
          InvalidConfigError: there is one group, a group has stages, or the devices, their memory
            or the model do not allow these numbers.
          RegroupError: the pause is expected to be longer, weights cannot be placed in the devices'
            memory, or something failed; both groups serve as before.
          EngineFailedError: the engine had failed before, or something failed, and the weights
            could not be put back; the runtime no longer serves.
        """
        _check_limit("max_pause_s", max_pause_s)
        return self._planner.regroup(encode, decode, max_pause_s)

    def measure_step_times(self, *, rounds: int = 2, max_wait_s: float | None = None) -> StepTimes:
        """Time every shape of step that a replica has compiled, for `planning.simulate`.

        It waits until no request runs. Requests that are submitted during the call start after it.
        It overwrites cached pages. Later pages are valued by the measured times.

        Args:
          rounds: repetitions of the whole measurement; the result has the medians.
          max_wait_s: seconds to wait for the end of running requests; None for no limit.

        Raises:
          EngineBusyError: requests ran for longer than `max_wait_s`.
          InvalidConfigError: the runtime has two groups of devices, or an argument is not allowed.
          ProcessGroupError: this process follows.
        """
        _check_limit("max_wait_s", max_wait_s)
        return self._planner.timings.measure_step_times(rounds, max_wait_s)

    def measure_group_times(
        self, *, rounds: int = 2, max_wait_s: float | None = None
    ) -> GroupTimes:
        """Time the steps of each of two device groups, and the handovers between them.

        `planning.simulate` takes its `costs()`. It waits until no request runs, as
        `measure_step_times` does. Each group is measured while the other one is idle.

        Raises:
          EngineBusyError: requests ran for longer than `max_wait_s`.
          InvalidConfigError: the runtime has one group of devices, or an argument is not allowed.
          ProcessGroupError: this process follows.
        """
        _check_limit("max_wait_s", max_wait_s)
        return self._planner.timings.measure_group_times(rounds, max_wait_s)

    def load_step_times(self, path: str | Path) -> StepTimes:
        """Load step times that were measured on this model, device and configuration, and saved.

        Cached pages are valued by these times from now on.

        Raises:
          InvalidProfileError: the model, device or configuration differs, or the file is not valid.
        """
        return self._planner.timings.load_step_times(path)

    def find_step_times(self, folder: Path) -> StepTimes | None:
        """Load the newest step times in a folder that `load_step_times` accepts; None without any.

        Cached pages are valued by these times from now on.

        Raises:
          InvalidConfigError: the runtime has two groups of devices.
        """
        return self._planner.timings.find_step_times(folder)

    def load_group_times(self, path: str | Path) -> GroupTimes:
        """Load times that `GroupTimes.save` wrote, of this model on two groups like these.

        Raises:
          InvalidConfigError: the runtime has one group of devices.
          InvalidProfileError: the model, a group or the configuration differs, or the file is not
            valid.
        """
        return self._planner.timings.load_group_times(path)

    def find_group_times(self, folder: Path) -> GroupTimes | None:
        """Load the newest times in a folder that `load_group_times` accepts; None without any.

        Raises:
          InvalidConfigError: the runtime has one group of devices.
        """
        return self._planner.timings.find_group_times(folder)

    # ---- the runtime itself ----

    @property
    def config(self) -> EngineConfig:
        """The present sizes of the executables and of the page pool."""
        return self._replicas.first.executor.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def max_length(self) -> int:
        return self._replicas.max_length

    def is_ready(self) -> bool:
        return all([replica.executor.is_ready() for replica in self._replicas.all])

    def stats(self, *, wait: bool = True) -> RuntimeStats:
        """Return a snapshot of the counters, which exist at any time."""
        return RuntimeStats.of(
            self._replicas,
            self._planner,
            weights_bytes=self._weights_bytes,
            predicting_s=0.0 if self._forecaster is None else self._forecaster.seconds,
            adapters=self._adapters.usage,
        )

    def outlook(self) -> dict[str, Outlook]:
        """Return the tokens and seconds that each unfinished request is expected to take, by id.

        A request whose last token is being computed is left out.
        """
        return self._replicas.outlook()

    def report(self) -> Report:
        """Return the report so far: figures, a table, JSON, a trace, a picture."""
        return self._replicas.report(self._planner.in_force)

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts of pages and slots agree between steps; for tests."""
        self._replicas.check_integrity()

    @property
    def learner(self) -> OnlineLearner | None:
        """The online trainer of the length predictor; None without `learns=True`."""
        return None if self._forecaster is None else self._forecaster.learner

    def resize_kv(self, size: int | str) -> int:
        """Resize the page pool, for instance to free memory for a trainer's step.

        Running requests continue with the same tokens. Only pages beyond the new end move. Requests
        are preempted, the last in the policy's order first, until the others fit. Length limits of
        answers are cut to what the pool holds, as at submission. A request that has no room for its
        next token even alone fails with PromptTooLongError, as does a prompt that does not fit and
        is submitted before the pool grows again.

        The runtime compiles for a new size, with a progress bar, and keeps the executables of
        earlier sizes, so alternate between few sizes. While pages are copied, the device holds the
        larger pool and one buffer of the smaller: a layer's keys on CPUs, half of it on GPUs.

        Args:
          size: bytes on each device, or a text such as "4GiB", rounded down to whole pages and to
            what all slots can use. 0 leaves two pages, of which requests can use one.

        Returns:
          Bytes of the pool on each device.

        Raises:
          DeviceMemoryError: the memory is not enough; nothing has changed.
          InvalidConfigError: `size` is not a size, or several processes serve the model.
        """
        return self._replicas.resize_kv(size)

    def __repr__(self) -> str:
        """Return the model, the policy and the sizes; of a closed runtime, that it is closed."""
        model, config = self.model_config, self.config
        replicas = len(self._replicas.all)
        return (
            f"Runtime({type(model).__name__.removesuffix('Config')}, {model.num_layers} layers, "
            f"{model.dtype}, policy {self.options.policy!r}, {replicas} replica(s) of "
            f"{config.max_slots} slots and {config.max_context:,} tokens of context"
            f"{'' if self._finalizer.alive else ', closed'})"
        )

    def close(self) -> None:
        """Cancel every request and free the page pool, but not the parameters.

        On a leader it also ends `follow` on the other processes.
        """
        self._finalizer()

    def _check_may_wait(self) -> None:
        self._replicas.check_may_wait()

    def _submit_batch(self, batch: PromptBatch) -> list[Pending[Completion]]:
        return self._intake.submit_batch(batch)


def _check_limit(name: str, seconds: float | None) -> None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    most = sys.float_info.max  # whole numbers above it are not valid floats
    if seconds is not None and not (is_number and (0 <= seconds <= most or seconds == math.inf)):
        raise InvalidConfigError(
            f"{name}={seconds!r} is not allowed; pass a number of seconds of at least 0"
        )


def _described(model: Any) -> str:
    if isinstance(model, str | Path):
        return repr(str(model))
    kind = type(model)
    return f"an object of the type {kind.__module__}.{kind.__qualname__}"
