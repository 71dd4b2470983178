"""Eight prompts answered in one batch by a real model: what `make demo` runs."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.panel import Panel

from jaxserve import JaxserveError, Runtime, SamplingParams
from jaxserve.core.metrics import summarise
from jaxserve.core.sizes import format_bytes

MODEL = "smollm2-135m"
MAX_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Give me three tips for learning to play the guitar.",
    "Write a short poem about the sea.",
    "What is the difference between a cat and a dog?",
    "How do I boil an egg?",
    "Tell me a fun fact about the Moon.",
    "What does a compiler do?",
)


def main() -> int:
    """Print the answers, and what it took to make them."""
    console = Console()
    started_s = time.perf_counter()
    with Runtime.from_pretrained(MODEL, max_slots=len(QUESTIONS), max_context=512) as rt:
        ready_s = time.perf_counter()
        prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = rt.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
        wall_s = time.perf_counter() - ready_s
        memory = rt.stats()
    for question, answer in zip(QUESTIONS, answers, strict=True):
        text = answer.text.strip() if answer.error is None else str(answer.error)
        more = " …" if answer.finish_reason == "length" else ""
        console.print(Panel(text + more, title=question, title_align="left"), markup=False)
    figures = summarise(answers, wall_s)
    console.print(
        f"{figures['output_tokens']} tokens for {len(QUESTIONS)} prompts in {wall_s:.1f} s: "
        f"{figures['output_tokens_per_s']:.0f} tokens/s, after {ready_s - started_s:.1f} s to start"
    )
    return 1 if any(answer.error is not None for answer in answers) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxserveError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
