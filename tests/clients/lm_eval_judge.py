# /// script
# requires-python = ">=3.11"
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.24.0"]
# ///
"""LM Evaluation Harness: a choice by log-likelihoods, and generations, without a hub."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval  # noqa: E402  # offline from its import on

URL, MODEL, FOLDER = sys.argv[1:]
with tempfile.TemporaryDirectory() as here:
    rows = [
        {"question": f"What is {i} + 1?", "choices": ["a", "bc"], "answer": 1} for i in range(4)
    ]
    path = Path(here) / "rows.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    tasks = [
        {
            **shared,
            "task": "choice",
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
        {
            **shared,
            "task": "generation",
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]
    at = {
        "base_url": f"{URL}/v1/completions",
        "model": MODEL,
        "tokenizer": FOLDER,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 512,
    }
    found = lm_eval.simple_evaluate(
        "local-completions", model_args=at, tasks=tasks, bootstrap_iters=0, log_samples=True
    )
    samples = found["samples"]["choice"]
    scores = [each[0] for sample in samples for each in sample["filtered_resps"]]
    assert len(scores) == 8 and all(-100 < float(score) < 0 for score in scores), scores
    assert len(found["samples"]["generation"]) == 4

    at["base_url"] = f"{URL}/v1/chat/completions"
    chats = lm_eval.simple_evaluate(
        "local-chat-completions",
        model_args=at,
        tasks=[{**tasks[1], "task": "chat"}],
        apply_chat_template=True,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert len(chats["samples"]["chat"]) == 4
