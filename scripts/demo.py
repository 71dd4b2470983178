"""The demo of `make demo`: a real model answers eight prompts in one batch."""

from __future__ import annotations

import resource
import sys
import time

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from jaxserve import Completion, JaxserveError, Runtime, SamplingParams
from jaxserve.core.metrics import summarise
from jaxserve.core.sizes import format_bytes
from jaxserve.runtime import RuntimeStats

MODEL = "smollm2-135m"
MAX_TOKENS = 96
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Give me three tips for learning to play the guitar.",
    "Write a short poem about the sea.",
    "What is the difference between a cat and a dog?",
    "What are whales?",
    "What is photosynthesis?",
    "What does a compiler do?",
)


def main() -> int:
    console = Console()
    started_s = time.perf_counter()
    with Runtime.from_pretrained(MODEL) as rt:
        ready_s = time.perf_counter()
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = rt.generate(chats, SamplingParams(max_tokens=MAX_TOKENS))
        wall_s = time.perf_counter() - ready_s
        stats = rt.stats()
    for question, answer in zip(QUESTIONS, answers, strict=True):
        console.print(Panel(_text(answer), title=Text(question), title_align="left"))
    figures = summarise(answers, wall_s)
    console.print(
        f"{figures['output_tokens']} tokens for {len(QUESTIONS)} prompts in one batch, "
        f"{wall_s:.1f} s: {figures['output_tokens_per_s']:.0f} tokens/s "
        f"({ready_s - started_s:.1f} s to start; a first run also compiles while it answers)",
        highlight=False,
    )
    console.print(_memory(stats), highlight=False)
    return 1 if any(answer.error is not None for answer in answers) else 0


def _text(answer: Completion) -> Text:
    if answer.error is not None:
        return Text(str(answer.error), style="red")
    return Text(answer.text.strip() + (" …" if answer.finish_reason == "length" else ""))


def _memory(stats: RuntimeStats) -> str:
    used = stats.max_pages_owned * (stats.pool_bytes // stats.num_pages)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"memory: weights {format_bytes(stats.weights_bytes)}, KV pool "
        f"{format_bytes(stats.pool_bytes)} (at most {format_bytes(used)} in use), process at its "
        f"peak {format_bytes(peak)}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxserveError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
