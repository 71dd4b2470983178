"""Tokens a second with and without speculation: `python -m benchmarks.speculation --help`.

The same prompts are answered greedily by a runtime that speculates and by one that does not, in
turns. Their answers must be the same, token for token, which is checked. With `--compare`, other
engines with their own lookup decoding answer the same prompts at the same lengths.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.common import workloads
from benchmarks.common.harness import Benchmark, nothing_failed, option, some_of, whole_numbers
from benchmarks.common.policies import policy_options
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns
from benchmarks.common.serving import Runtimes, answered
from benchmarks.offline.peers.compare import Peer, named
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.lookup import HostLookup
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


KINDS = ("chat", "summarising", "repeating", "editing")

# Maximum characters of a text to repeat.
_MAX_CHARACTERS = 600
# Number of texts for one summary, and maximum characters of each.
_NUM_SUMMARISED, _MAX_SUMMARISED = 6, 200
_NAMES = ("total", "count", "price", "width", "height", "weight", "score", "limit", "offset")
_VERBS = ("add", "scale", "check", "update", "merge", "split", "clean", "load")


def prompts_of(kind: str, texts: Sequence[str], seed: int) -> list[list[dict[str, Any]]]:
    """Return a chat of one message for each text.

    Args:
      kind: one of `KINDS`. "chat" is the text itself; "summarising" asks for the three of six
        texts, this one and the next ones, that matter most, word for word; "repeating" asks for the
        text again; "editing" asks for a made-up program with one name changed, which depends on the
        seed only.
    """
    rng = random.Random(seed)
    wanted = []
    for i, text in enumerate(texts):
        if kind == "summarising":
            several = [texts[(i + j) % len(texts)] for j in range(_NUM_SUMMARISED)]
            lines = [f"- {' '.join(each.split())[:_MAX_SUMMARISED]}" for each in several]
            text = (
                "These are messages of a forum:\n\n" + "\n".join(lines) + "\n\nSummarise them: "
                "quote the three most important messages word for word, as a list."
            )
        elif kind == "repeating":
            text = f"Repeat this text word for word:\n\n{text[:_MAX_CHARACTERS]}"
        elif kind == "editing":
            old, new = rng.sample(_NAMES, 2)
            text = (
                f"Write this program again, in full, with {old} renamed to {new}:\n\n"
                f"```python\n{_program(rng, old)}```"
            )
        wanted.append([{"role": "user", "content": text}])
    return wanted


def _program(rng: random.Random, name: str) -> str:
    functions = []
    for verb in rng.sample(_VERBS, 4):
        other = rng.choice([each for each in _NAMES if each != name])
        functions.append(
            f"def {verb}_{name}({name}, {other}={rng.randrange(100)}):\n"
            f'    """Return the {name} after the {other}."""\n'
            f"    if {name} > {other}:\n"
            f"        {name} = {name} - {other}\n"
            f"    return {name} * {rng.randrange(2, 9)}\n"
        )
    return "\n\n".join(functions)


# Proposals of an iteration, as one sequence gets them by default.
_MOST_PROPOSED = 7


def most_by_lookup(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return an iteration's tokens if each computed seven proposals at no cost.

    So lookup in the request itself makes this answer faster by at most about this factor.
    """
    lookup, place, num_iterations = HostLookup(prompt), 0, 0
    while place < len(answer):
        lookup.follow(answer[:place])
        proposed = lookup.propose(_MOST_PROPOSED)
        num_right = 0
        for token, wanted in zip(proposed, answer[place:], strict=False):
            if token != wanted:
                break
            num_right += 1
        place += 1 + num_right
        num_iterations += 1
    return min(place, len(answer)) / max(1, num_iterations)


_WITHOUT, _LOOKUP, _DRAFT = "without", "lookup", "draft"
# Engines that look proposals up.
_PEERS = ("llamacpp", "vllm")


def run(options: argparse.Namespace) -> dict[str, Any]:
    kinds = some_of(options.kinds, "--kinds", KINDS)
    compared_kinds = some_of(options.compare_kinds or options.kinds, "--compare-kinds", kinds)
    counts = whole_numbers(options.requests, "--requests")
    options.num_requests = max(counts)
    peers = _peers(options)
    cases, answers = [], {}
    with Runtimes(options) as open_runtimes:
        runtimes = {
            _WITHOUT: open_runtimes.open(),
            _LOOKUP: open_runtimes.open(speculation=_LOOKUP),
        }
        if options.draft_model is not None:
            drafting = {"speculation": _DRAFT, "draft_model": options.draft_model}
            runtimes[_DRAFT] = open_runtimes.open(**drafting)
        tokenizer = open_runtimes.tokenizer
        items = workloads.items(options, runtimes[_WITHOUT])
        texts = [tokenizer.decode(item.prompt_token_ids) for item in items]
        for kind in kinds:
            prompts = prompts_of(kind, texts, options.seed)
            for count in counts:
                cases.append(_case(runtimes, kind, prompts[:count], options))
            if peers and kind in compared_kinds:
                answers[kind] = _items(runtimes[_WITHOUT], prompts, options.output_tokens)
    compared = {kind: _compared(peers, items, counts, options) for kind, items in answers.items()}
    return {"cases": cases, "peers": compared}


def _case(
    runtimes: dict[str, Runtime], kind: str, prompts: list[Any], options: argparse.Namespace
) -> dict[str, Any]:
    answers: dict[str, list[tuple[int, ...]]] = {way: [] for way in runtimes}
    most: list[float] = []
    params = SamplingParams(max_tokens=options.output_tokens)

    def play(way: str) -> Figures:
        figures, engine, done = answered(runtimes[way], prompts, params)
        answers[way] += [tuple(each.token_ids) for each in done]
        if not most:
            most.extend(most_by_lookup(each.prompt_token_ids, each.token_ids) for each in done)
        num_computed, num_right = engine["num_draft_tokens"], engine["num_accepted_tokens"]
        share = num_right / num_computed if num_computed else 0.0
        return {**figures, "num_draft_tokens": num_computed, "accepted_share": share}

    at = f"{kind}, {len(prompts)} requests"
    found = take_turns(tuple(runtimes), options.repeats, play, at=at)
    return {
        "kind": kind,
        "num_requests": len(prompts),
        "is_faster_by": {
            way: ratio(found, "tokens_per_s", way, _WITHOUT) for way in runtimes if way != _WITHOUT
        },
        "most_by_lookup": statistics.mean(most),
        "num_answers": len(answers[_WITHOUT]),
        "num_same_answers": sum(
            len(set(each)) == 1 for each in zip(*answers.values(), strict=True)
        ),
        **{way: summary(runs) for way, runs in found.items()},
    }


def _peers(options: argparse.Namespace) -> dict[str, Peer]:
    peers = named(options.compare)
    if unable := sorted(set(peers) - set(_PEERS)):
        raise InvalidConfigError(f"--compare {unable} do not look up; pass some of {_PEERS}")
    return peers


def _items(rt: Runtime, prompts: list[Any], output_tokens: int) -> list[WorkloadItem]:
    done = rt.generate(prompts, SamplingParams(max_tokens=output_tokens), progress=False)
    return [
        WorkloadItem(
            prompt_token_ids=tuple(each.prompt_token_ids),
            num_output_tokens=len(each.token_ids),
            max_tokens=output_tokens,
        )
        for each in done
    ]


def _compared(
    peers: dict[str, Peer],
    items: list[WorkloadItem],
    counts: list[int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the figures of all engines, with lookup decoding."""
    from benchmarks.offline.peers.compare import compare
    from jaxserve.models.registry import resolve

    return compare(
        peers,
        resolve(options.model).fetch(),
        items,
        batch_size=max(counts),
        repeats=options.repeats,
        settings={"speculation": "lookup", "dtype": "float32", "max_slots": max(counts)},
        fewer=sorted({*counts} - {max(counts)}),
        speculates=True,
    )


def _is_whole(result: dict[str, Any]) -> bool:
    cases = result["cases"]
    is_same = all(case["num_same_answers"] == case["num_answers"] for case in cases)
    return is_same and nothing_failed(result)


OPTIONS = (
    *workloads.options(),
    repeats("way"),
    *policy_options("auto"),
    option("--kinds", ",".join(KINDS), "kinds of prompts, separated by commas"),
    option("--requests", "1,4,16,64", "numbers of requests at once, separated by commas"),
    option("--draft-model", None, "name, folder or file of a draft model, to compare it too"),
    option("--compare", None, f"engines to run beside it, which look up: {', '.join(_PEERS)}"),
    option("--compare-kinds", None, "the kinds that they answer; all by default, 20 minutes each"),
)
main = Benchmark(__doc__, run, OPTIONS, "speculation", is_whole=_is_whole)


if __name__ == "__main__":
    sys.exit(main())
