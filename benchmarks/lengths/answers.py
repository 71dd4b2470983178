"""A model's own answers to ShareGPT's questions: `python -m benchmarks.lengths.answers --help`.

A length predictor of this model learns from them. The file has the position of each question and
the length of its answer, not the texts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.harness import Benchmark, option
from jaxserve.core.metrics import spread
from jaxserve.workload.answers import Question, questions

if TYPE_CHECKING:
    from jaxserve.core.request import Completion
    from jaxserve.runtime import Runtime


def run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve import Runtime

    with ExitStack() as stack:
        rt = stack.enter_context(
            Runtime.from_pretrained(
                options.model, max_slots=options.max_slots, max_context=options.max_context
            )
        )
        options.lengths.parent.mkdir(parents=True, exist_ok=True)
        lengths_file = stack.enter_context(options.lengths.open("w", encoding="utf-8"))
        tokens_file = options.tokens and stack.enter_context(
            options.tokens.open("w", encoding="utf-8")
        )
        asked = _draw(options, rt)
        begin_s = time.perf_counter()
        reasons, lengths = [], []
        for question, done in _answers(rt, asked, options):
            reasons.append(done.finish_reason)
            lengths.append(len(done.token_ids))
            line = {
                "record": question.record,
                "turn": question.turn,
                "output_length": len(done.token_ids),
                "finish_reason": done.finish_reason,
            }
            print(json.dumps(line), file=lengths_file, flush=True)
            if tokens_file:
                line |= {
                    "conversation": question.origin,
                    "prompt": question.text,
                    "prompt_token_ids": done.prompt_token_ids,
                    "token_ids": done.token_ids,
                }
                print(json.dumps(line), file=tokens_file, flush=True)
        wall_s = time.perf_counter() - begin_s
        return {
            "num_answers": len(lengths),
            "share_at_the_limit": reasons.count("length") / len(reasons),
            "output_length": spread(lengths),
            "output_tokens_per_s": sum(lengths) / wall_s,
            "wall_s": wall_s,
        }


def _draw(options: argparse.Namespace, rt: Runtime) -> list[Question]:
    from jaxserve.core.assets import fetch
    from jaxserve.core.errors import InvalidConfigError
    from jaxserve.workload import sharegpt

    found = list(questions(fetch(sharegpt.FILE)))
    random.Random(options.seed).shuffle(found)
    asked: list[Question] = []
    for question in found:
        if len(asked) == options.num_prompts:
            return asked
        # Counting takes time, so questions that are certainly too long are skipped first.
        if len(question.text) <= 8 * options.max_prompt_tokens:
            num_tokens = len(rt.tokenizer.encode(question.text)) if rt.tokenizer else 0
            if num_tokens <= options.max_prompt_tokens:
                asked.append(question)
    raise InvalidConfigError(
        f"--num-prompts {options.num_prompts}: ShareGPT has {len(asked)} questions of at most "
        f"{options.max_prompt_tokens} tokens; ask for fewer, or allow longer ones"
    )


def _answers(
    rt: Runtime, asked: Iterable[Question], options: argparse.Namespace
) -> Iterator[tuple[Question, Completion]]:
    from tqdm import tqdm

    from jaxserve import SamplingParams

    pending = [
        rt.submit(
            [{"role": "user", "content": question.text}],
            SamplingParams(
                max_tokens=options.max_tokens, temperature=options.temperature, seed=index
            ),
        )
        for index, question in enumerate(asked)
    ]
    bar = tqdm(pending, desc="answering", unit="answer", delay=2, leave=False)
    for question, one in zip(asked, bar, strict=True):
        yield question, one.result()


OPTIONS = (
    option("--lengths", None, "JSON lines of ids and lengths, written here", Path, required=True),
    option("--tokens", None, "also write prompts' and answers' tokens here", Path),
    option("--num-prompts", 1500, "questions drawn"),
    option("--max-prompt-tokens", 128, "longer questions are left out"),
    option("--max-tokens", 256, "of an answer"),
    option("--temperature", 0.7, "0 is greedy"),
    option("--model", "smollm2-135m", "a name, folder or GGUF file"),
    option("--max-slots", None, "most answers at once", int),
    option("--max-context", 512, "most tokens of prompt and answer"),
    option("--seed", 0, "of the draw; answer i is sampled with seed i"),
)
main = Benchmark(__doc__, run, OPTIONS, "answers")


if __name__ == "__main__":
    sys.exit(main())
