"""Messages for names that do not exist here: a near name, or the one for another engine's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

# Options of vLLM, SGLang and transformers, and what says the same here.
OPTIONS_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "max_model_len": "max_context",
        "context_length": "max_context",
        "max_num_seqs": "max_slots",
        "max_running_requests": "max_slots",
        "max_num_batched_tokens": "max_step_tokens",
        "chunked_prefill_size": "max_step_tokens",
        "block_size": "page_size",
        "gpu_memory_utilization": "kv_memory, in bytes or as '4GiB'; by default all that is left",
        "mem_fraction_static": "kv_memory, in bytes or as '4GiB'; by default all that is left",
        "kv_cache_memory_bytes": "kv_memory",
        "kv_cache_dtype": "kv_dtype",
        "swap_space": "host_memory",
        "quantization": "quantize; a folder in few bits needs none",
        "load_in_4bit": "quantize='int4'",
        "load_in_8bit": "quantize='int8'",
        "torch_dtype": "dtype of from_pretrained",
        "dtype": "dtype to from_pretrained; a model that is given keeps its own",
        "tensor_parallel_size": "mesh=sharding.make_mesh(tensor=...)",
        "tp_size": "mesh=sharding.make_mesh(tensor=...)",
        "pipeline_parallel_size": "mesh=sharding.StagePlan.of(...)",
        "data_parallel_size": "mesh=sharding.make_mesh(data=...)",
        "device_map": "mesh=sharding.make_mesh(...); by default one device",
        "enable_prefix_caching": "nothing: policy='auto' keeps prefixes",
        "enable_chunked_prefill": "nothing: prompts are computed in chunks of max_step_tokens",
        "speculative_config": "speculation and draft_model",
        "enable_lora": "max_adapters",
        "max_loras": "max_adapters",
        "max_lora_rank": "max_adapter_rank",
        "enforce_eager": "warmup=False, which compiles each step at its first use",
        "trust_remote_code": "nothing: no code of a checkpoint is run",
        "scheduling_policy": "policy",
        "max_queue_size": "max_waiting",
        "use_tqdm": "progress",
        "attention_backend": "attention",
    }
)
# Sampling parameters of vLLM, transformers and HTTP APIs, and what says the same here.
PARAMS_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "max_length": "max_tokens, which does not count the prompt",
        "max_completion_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "stop_sequences": "stop",
        "stop_strings": "stop",
        "eos_token_id": "stop_token_ids",
        "do_sample": "temperature: 0, the default, is greedy, and more than 0 samples",
        "num_return_sequences": "n",
        "best_of": "n, and a choice among the samples",
        "guided_json": "json_schema",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "structured_outputs": "json_schema, regex, grammar or choice",
        "response_format": "json_schema or json_object",
        "lora_request": "adapter",
    }
)


def explain_unknown(
    given: Iterable[str], known: Sequence[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return for each unknown name which to pass instead; all known ones if none is near."""
    said, has_none = [], False
    for name in sorted(given):
        near = get_close_matches(name, known, n=1)
        if name in elsewhere:
            said.append(f"{name} is not known here; pass {elsewhere[name]}")
        elif near:
            said.append(f"{name} is not known; did you mean {near[0]}?")
        else:
            said.append(f"{name} is not known")
            has_none = True
    text = "; ".join(said)
    return f"{text}; known are {', '.join(known)}" if has_none else text
