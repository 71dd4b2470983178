"""The table of every kind of result; each row that holds numbers links to its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markdown import Markdown

from benchmarks.common.harness import show
from benchmarks.figures import cells, exegpt, papers
from benchmarks.figures.render import (
    Cell,
    Column,
    Table,
    caption,
    drawn,
    each,
    joined,
    key,
    lost,
    name,
    runs,
    show_in,
    shown,
    table,
    where,
)
from benchmarks.figures.results import Place, ResultFileError, bound_name, is_quantised

# Throughput that adapters are to keep, of that without any.
_LEAST_ADAPTED = 0.8
# Lookup decoding costs at most this share of the throughput without it.
_LEAST_SPECULATING = 0.98
# Ways to the model that are our own; a peer is compared with the last of them that was measured.
_OUR_WAYS = ("in process", "socket", "http", "completions")


# ---- requests at once, and other engines ----


def offline(results: Sequence[Place]) -> list[str]:
    """Return one table for all results, and one for the peers of each result that has them."""
    columns: tuple[Column, ...] = (
        ("workload", _offline_workload),
        ("runs", runs),
        ("output tokens/s", "{output_tokens_per_s:@~.0f}"),
        ("of the bound", _reached),
        ("device waits for host", "{host_gap_share:~.1%}"),
        ("cold start", "{startup[cold][ready_s]:.0f s?}"),
        ("warm start", "{startup[warm][ready_s]:.0f s?}"),
    )
    rows = [[show_in(cell, each) for _, cell in columns] for each in results]
    first = [table([heading for heading, _ in columns], rows), *[""] * (len(results) - 1)]
    return [
        joined(above, peers(result) if result.has_peers else "")
        for above, result in zip(first, results, strict=True)
    ]


def _offline_workload(row: Place) -> str:
    bits = ", weights in {quantize}," if is_quantised(row) else ""
    what = "{num_requests} {workload} requests, {model}" + bits + " in {precision}, policy {policy}"
    return f"{show_in(what, row)}, {where(row)}"


def _reached(row: Place) -> str:
    if is_quantised(row):  # the bound is that of weights in the model's dtype
        return ""
    return f"{row.number('bound', 'reached'):.0%} of {bound_name(row)}"


def peers(result: Place) -> str:
    """Return every engine on the requests of an offline result, and where ours is behind."""
    bits = ", weights in {quantize}" if is_quantised(result) else ""
    what = "{num_requests} {workload} requests, {model}" + bits + ", every engine in turns"
    how = "medians of {compare[repeats]} whole runs (least to most)"
    what, how = (show_in(each, result) for each in (what, how))
    return joined(caption(result, what, how=how), engines(result.inside("compare")))


def engines(compared: Place) -> str:
    """Return every engine of a comparison, and a sentence of where ours is behind."""
    rows, behind = [], []
    fewer = list(compared.get().get("fewer") or ())
    for engine, figures in compared.items("engines"):
        if figures.get("error"):
            why = " ".join(figures["error"].split())
            rows.append([name(engine), compared.linked("failed"), why, "", *[""] * len(fewer)])
            continue
        own = compared.inside("engines", engine)
        faster_by = own.spread("jaxserve_is_faster_by")
        cells = [
            name(engine),
            shown(own.spread("output_tokens_per_s"), ".0f", link=compared.link),
            shown(faster_by, ".2f"),
            shown(own.spread("startup_s"), ".1f", " s"),
        ]
        if faster_by.median < 1:
            behind.append(f"{name(engine)}: {shown(faster_by, '.2f')} times its speed")
        for count in fewer:
            of_fewer = compared.inside("fewer", count, engine)
            ratio = of_fewer.spread("jaxserve_is_faster_by")
            rate = shown(of_fewer.spread("output_tokens_per_s"), ".0f")
            cells.append(f"{rate}, {shown(ratio, '.2f')} times")
            if ratio.median < 1:
                speed = f"{shown(ratio, '.2f')} times its speed"
                behind.append(f"{name(engine)} at {count} of them: {speed}")
        rows.append(cells)
    header = ["engine", "output tokens/s", "jaxserve is faster by", "start-up"]
    header += [f"{count} of them: tokens/s, faster by" for count in fewer]
    lost = f"jaxserve is behind {' and '.join(behind)}." if behind else "No engine is faster."
    return joined(table(header, rows), lost)


# ---- policies ----


def _policies_workload(whole: Place) -> str:
    given = whole.get("arguments")
    arrivals = given["arrivals"]
    when = "all at once" if arrivals in (None, "all") else f"arrivals {arrivals}"
    if arrivals is None and given["workload"].startswith("recorded:"):
        when = "as they were recorded"
    what = f"{given['num_requests']} {given['workload']} requests, {when}, {given['model']}"
    if given.get("kv_memory"):
        what += f", a page pool of {given['kv_memory']}"
    if given.get("max_slots"):
        what += f", at most {given['max_slots']} at once"
    return what


_POLICY_ROWS = each("policies", ...)
POLICIES = Table(
    what=_policies_workload,
    rows=_POLICY_ROWS,
    columns=(
        ("policy", key()),
        ("output tokens/s", "{output_tokens_per_s:@~.0f}"),
        ("latency, median", "{latency_s[p50]:~.1f s?}"),
        ("99th percentile", "{latency_s[p99]:~.1f s?}"),
        ("first token", "{time_to_first_token_s[p50]:~.2f s?}"),
        ("average batch", "{average_batch:~.1f?}"),
        ("iterations", "{engine[num_iterations]:~.0f?}"),
        ("preempted", "{num_preemptions:~.0f?}"),
    ),
    below=lost("output tokens/s", _POLICY_ROWS, lambda row: row.spread("output_tokens_per_s")),
)

_ONLINE_ROWS = each("policies", ..., "points", ...)
ONLINE = Table(
    what="{arguments[num_requests]} {arguments[workload]} requests a rate, {arguments[model]}",
    rows=_ONLINE_ROWS,
    columns=(
        ("policy", key(1)),
        ("requests/s", "{rate:@.2g}"),
        ("served", "{requests_per_s:~.2g}"),
        ("tokens/s", "{output_tokens_per_s:~.0f}"),
        ("p90 s/token", "{normalised_latency_s[p90]:~.3f s}"),
        ("p90 first token", "{time_to_first_token_s[p90]:~.2f s}"),
        ("within limits", "{goodput[share]:~.0%?}"),
    ),
    below=lost(
        "p90 s/token",
        _ONLINE_ROWS,
        lambda row: row.spread("normalised_latency_s", "p90"),
        policy=1,
        place="at {rate:.2g} requests/s",
        is_lower_better=True,
    ),
)

SIMULATE = Table(
    what="Measured and simulated",
    rows=each("policies", ...),
    columns=(
        ("policy", "{policy:words}"),
        ("measured tokens/s", "{measured[output_tokens_per_s]:@~.0f}"),
        ("predicted", "{predicted[output_tokens_per_s]:~.0f}"),
        ("error", "{error[output_tokens_per_s]:~+.1%}"),
        ("measured p99 latency, s", "{measured[latency_s][p99]:@~.1f}"),
        ("predicted", "{predicted[latency_s][p99]:~.1f}"),
        ("error", "{error[latency_p99_s]:~+.1%}"),
    ),
)


def _grid_rows(whole: Place) -> Iterator[Place]:
    return (row for row in each("rows", ...)(whole) if row.get("policy") == "auto")


def _of_best_other(best: Callable[..., float], *keys: str, links: bool) -> Callable[[Place], str]:
    """Show a figure over the best of the other policies on the same workload and pool."""

    def cell(row: Place) -> str:
        place = row.get("workload"), row.get("pool")
        others = [
            other.number(*keys)
            for other in each("rows", ...)(row.above(0))
            if (other.get("workload"), other.get("pool")) == place
            if other.get("policy") != "auto"
        ]
        ratio = f"{row.number(*keys) / best(others):.3f}"
        return row.linked(ratio) if links else ratio

    return cell


def _grid_workload(whole: Place) -> str:
    memory = "no host memory" if whole.get("arguments", "no_host") else "host memory"
    what = "auto, {arguments[num_requests]} requests all at once, {arguments[max_slots]} slots, "
    return show_in(f"{what}{memory}, Llama 3 8B on an A100 80 GB as rooflines", whole)


POLICIES_GRID = Table(
    what=_grid_workload,
    rows=_grid_rows,
    columns=(
        ("workload", "{workload}"),
        ("pool", "{pool}"),
        ("predictor", "{predictor}"),
        ("tokens/s over the best other", _of_best_other(max, "output_tokens_per_s", links=True)),
        ("p99 over it", _of_best_other(min, "latency_s", "p99", links=False)),
    ),
    how="simulated",
)


# ---- lengths ----


def _predictor_columns(whole: Place) -> tuple[Column, ...]:
    outgrown = "{{promises[{0}][missed]:.1%}} ({{promises[{0}][reserved_tokens]:.0f}})"
    return (
        ("predictor", "{name}"),
        ("accuracy", "{accuracy:@.1%}"),
        ("wrong by, buckets", "{wrong_by:.2f}"),
        ("error, tokens", "{error_tokens:.0f}"),
        ("too short", "{under_prediction:.1%}"),
        *(
            (f"outgrown at {float(level):.0%}", outgrown.format(level))
            for level in whole.get("contenders", 0, "promises")
        ),
    )


def _predictor_data(whole: Place) -> str:
    edges = whole.get("bucket_edges")
    return show_in(
        f"{{num_examples[test]}} {{settings[data]}} prompts, {len(edges) - 1} buckets up to "
        f"{edges[-1]} tokens; outgrown reservations and, in brackets, their mean length in tokens",
        whole,
    )


PREDICTOR = Table(
    what=_predictor_data,
    rows=each("contenders", ...),
    columns=_predictor_columns,
    how="one training",
)


def _probe_rows(whole: Place) -> list[Place]:
    """Return the first figure of each way to predict."""
    rows = {row.get("name"): row for row in reversed(list(each("figures", ...)(whole)))}
    return list(reversed(rows.values()))


def _probe_columns(whole: Place) -> list[Column]:
    def at(elapsed: int | None) -> Callable[[Place], str]:
        def cell(row: Place) -> str:
            for other in each("figures", ...)(whole):
                if (other.get("name"), other.get("elapsed")) == (row.get("name"), elapsed):
                    error = f"{other.number('error_tokens'):.0f}"
                    right = f"({other.number('accuracy'):.0%})"
                    return f"{row.linked(error) if other == row else error} {right}"
            return ""

        return cell

    found = dict.fromkeys(row.get("elapsed") for row in each("figures", ...)(whole))
    columns = [("all" if elapsed is None else f"{elapsed}", at(elapsed)) for elapsed in found]
    return [("", "{name}"), *columns]


PROBE = Table(
    what="Tokens by which what is left of {num_answers[test]:.0f} answers was mistaken, and share "
    "of right buckets in brackets, by tokens that had come; an iteration of {cost[batch_size]:.0f} "
    "rows takes {cost[iteration_us_without]:.0f} us, with the probe {cost[iteration_us_with]:.0f} "
    "us ({cost[slower_by]:+.1%})",
    rows=_probe_rows,
    columns=_probe_columns,
    how="one training",
)


# ---- devices ----

STARTUP = Table(
    what="Starts of {model} in new processes",
    rows=lambda whole: map(whole.inside, ("cold", "warm")),
    columns=(
        ("start", key()),
        ("first token", "{first_token_s:@~.1f s}"),
        ("imports", "{imports_s:~.1f s}"),
        ("tokenizer", "{tokenizer_s:~.1f s}"),
        ("weights", "{weights_s:~.1f s}"),
        ("page pool", "{cache_s:~.1f s}"),
        ("first answer", "{first_answer_s:~.1f s}"),
        ("second answer", "{second_answer_s:~.1f s}"),
        ("executables", "{num_loaded:.0f} loaded, {num_compiled:.0f} compiled"),
        ("resident", "{resident_bytes:~.2f GB}"),
    ),
)

LOADING = Table(
    what="A random checkpoint",
    rows=each(),
    columns=(
        ("checkpoint", "{shape}, {dtype}, {num_shards:.0f} shards"),
        ("size", "{checkpoint_bytes:.2f GB}"),
        ("peak host memory", "{peak_host_bytes:.2f GB}"),
        ("over the size", "{ratio:@~.2f}"),
        ("from disk in", "{load_s:~.0f s}"),
    ),
)


def _compiled_model(whole: Place) -> str:
    target = "an H100" if whole.get("arguments", "target") == "h100" else "its own CPU"
    what = (
        "Executables of a Llama of the shape {arguments[shape]} with {arguments[layout]} layers, "
        "{arguments[max_slots]} slots and steps of {arguments[max_step_tokens]:,} tokens, compiled"
    )
    return f"{show_in(what, whole)} for {target} without a cache"


_COMPILED = {"serial": "one after the other", "parallel": "on a start's threads"}
COMPILE_TIMES = Table(
    what=_compiled_model,
    rows=lambda whole: map(whole.inside, _COMPILED),
    columns=(
        ("compiled", lambda row: _COMPILED[str(row.at[0])]),
        ("executables", lambda row: f"{len(row.get('executables')):,}"),
        ("all are made after", "{wall_s:@.0f s}"),
        ("sum of the seconds of each", "{sum_s:.0f s}"),
    ),
)


def _quality_rows(whole: Place) -> Iterator[Place]:
    yield whole.inside("unquantised")
    yield from each("formats", ...)(whole)


def _perplexity_ratio(row: Place) -> str:
    if row.at == ("unquantised",):
        return ""
    return f"{row.number('perplexity') / row.above(0).number('unquantised', 'perplexity'):.3f}"


QUALITY = Table(
    what="{num_tokens:,.0f} tokens of held-out ShareGPT texts, {model} in {dtype}",
    rows=_quality_rows,
    columns=(
        ("weights", lambda row: str(row.at[-1])),
        ("size", "{weights_bytes:.0f MB}"),
        ("perplexity", "{perplexity:@.3f}"),
        ("ratio", _perplexity_ratio),
        ("KL divergence, nats", "{divergence:.4f?}"),
        ("same greedy token", "{agreement:.1%?}"),
    ),
    how="one pass, which nothing random is in",
    below=lambda whole: [
        f"Worse than it should be: {problem}." for _, problem in whole.items("warnings")
    ],
)


# Fields of a refused configuration that its row names.
_MAX_UNREAD = 8


def _architectures(*outcomes: str) -> Callable[[Place], list[Place]]:
    def rows(whole: Place) -> list[Place]:
        every = each("architectures", ...)(whole)
        return [row for row in every if row.get("outcome") in outcomes]

    return rows


def _is_missing(row: Place) -> str:
    unread = row.get("unread")
    if row.get("nearest") is None:
        return row.get("reason").partition("; ")[0].replace("|", "/")
    if not unread:
        return "other formulas with the same fields"
    more = f" and {len(unread) - _MAX_UNREAD} more" if len(unread) > _MAX_UNREAD else ""
    return ", ".join(f"`{field}`" for field in unread[:_MAX_UNREAD]) + more


def _refused(whole: Place) -> list[str]:
    columns: tuple[Column, ...] = (
        ("refused", "`{at[1]}`"),
        ("class", "{class_name}"),
        ("nearest family", "{nearest}"),
        ("what it does not read, or the reason", _is_missing),
    )
    return [drawn(columns, _architectures("refused", "disagrees", "fails"), whole)]


COVERAGE = Table(
    what=lambda whole: "Of {} architectures {} agree, {} are refused, and {} are wrong".format(
        sum(whole.get("counts").values()),
        whole.linked(str(whole.get("counts", "agrees"))),
        whole.get("counts", "refused"),
        whole.get("counts", "disagrees") + whole.get("counts", "fails"),
    ),
    rows=_architectures("agrees"),
    columns=(
        ("`model_type`", "`{at[1]}`"),
        ("class of transformers", "{class_name}"),
        ("family here", "`{family}`"),
        ("relative error of logits", "{error:@.0e}"),
    ),
    how="tiny random checkpoints, each checked once",
    below=_refused,
)


def _slowest_points(whole: Place) -> list[Place]:
    """Return the point of each policy and context whose planning takes longest."""
    slowest: dict[tuple[str, int | None], tuple[float, Place]] = {}
    for row in each("points", "here", ...)(whole):
        place = row.get("policy"), row.get().get("max_context")
        p99 = row.spread("planning_ms", "p99").median
        if place not in slowest or p99 > slowest[place][0]:
            slowest[place] = p99, row
    return [row for _, row in slowest.values()]


def _planning_columns(whole: Place) -> list[Column]:
    columns: list[Column] = [
        ("policy", "{policy:words}"),
        ("slots", "{max_slots}"),
        ("waiting", "{num_waiting:,}"),
        ("context", "{max_context:,.0f?}"),
    ]
    figures = (
        ("planning, median", "{planning_ms[p50]:@~.2f}"),
        ("99th percentile", "{planning_ms[p99]:~.2f}"),
        ("worst", "{planning_ms[max]:~.1f}"),
        ("host, median", "{host_ms[p50]:~.2f}"),
    )

    def of(checkout: str, cell: str) -> Cell:
        return lambda row: show_in(cell, row.above(0).inside("points", checkout, row.at[-1]))

    names = {"here": "this commit", "against": f"{whole.get('arguments')['against']}"}
    for checkout, _ in whole.items("points"):
        columns += [(f"{what}, {names[checkout]}", of(checkout, cell)) for what, cell in figures]
    return columns


PLANNING = Table(
    what="Milliseconds a step, simulated device; of each policy and context the slowest point",
    rows=_slowest_points,
    columns=_planning_columns,
)


def _of_least(row: Place) -> str:
    sent, least = row.number("decode", "bytes"), row.number("decode", "least_bytes")
    return f"{sent / least:.2f}" if least else ""


SHARDING = Table(
    what="{rows:.0f} sequences of a model of {model[layers]} layers",
    rows=each("runs", ...),
    columns=(
        ("plan", "{plan}"),
        ("bytes a decode iteration", "{decode[bytes]:@,.0f}"),
        ("of the least", _of_least),
        ("bubble", "{pipeline[bubble]:.1%?}"),
        ("ideal", "{pipeline[ideal_bubble]:.1%?}"),
    ),
    how="counted",
)

_FLEETS = {"roles": "one of each role", "whole": "two without roles"}
_FLEET_TIMES = {
    "first token": "first_token_s",
    "answer": "latency_s",
    "between tokens": "gap_s",
}
ROLES = Table(
    what="{arguments[num_requests]} prompts of {arguments[prompt_tokens]} tokens, answers of "
    "{arguments[output_tokens]}, arrivals {arguments[arrivals]}",
    rows=each("fleets", ...),
    columns=(
        ("replicas", lambda row: _FLEETS[str(row.at[1])]),
        ("output tokens/s", "{output_tokens_per_s:@~.0f}"),
        *(
            (f"{what}, {of}", f"{{{figure}[{level}]:~.2f s}}")
            for what, figure in _FLEET_TIMES.items()
            for of, level in (("median", "p50"), ("p99", "p99"))
        ),
    ),
)

GPU_CHECK = Table(
    what="Results and their bars",
    rows=each("bars", ...),
    columns=(
        ("what", "{what}"),
        ("wanted", "{wanted}"),
        ("found", lambda row: row.get("found") and row.linked(row.get("found"))),
        ("verdict", "{verdict}"),
    ),
    how="one run",
)


# ---- HTTP and grammars ----


def _of_http(cell: str) -> Cell:
    """Show a cost of HTTP at the row's number of connections."""
    return lambda row: show_in(cell, row.above(2)) if row.at[3] == "http" else ""


_HTTP_COLUMNS: tuple[Column, ...] = (
    ("connections", "{above2[connections]:,}"),
    ("way", "{at[3]}"),
    ("output tokens/s", "{at_once[tokens_per_s]:@~.0f}"),
    ("first token, median", "{poisson[first_token_s][p50]:~.1f ms?}"),
    ("99th percentile", "{poisson[first_token_s][p99]:~.1f ms?}"),
    ("a token, median", "{poisson[token_s][p50]:~.1f ms?}"),
    ("99th percentile", "{poisson[token_s][p99]:~.1f ms?}"),
    (
        "arrivals, of the requests that the way itself answers at once",
        "{poisson[share_of_own_rate]:~.0%?}",
    ),
    (
        "of the first token outside the engine, mean",
        _of_http("{costs[outside_engine_s]:~.1f ms}"),
    ),
    *(
        column
        for base, costs in (("in process", "costs"), ("over sockets", "costs_beside_socket"))
        for column in (
            (f"of the throughput {base}", _of_http(f"{{{costs}[throughput_share]:~.1%}}")),
            (
                f"first token later than {base}, median",
                _of_http(f"{{{costs}[first_token_later_s]:~.1f ms}}"),
            ),
        )
    ),
)


def _http_below(whole: Place) -> Iterator[str]:
    for point in each("points", ...)(whole):
        yield from _behind_peers(point)
    for peer, reason in whole.items("failed"):
        yield f"{peer} failed: {reason}"


def _behind_peers(point: Place) -> Iterator[str]:
    """Yield a sentence for each peer that is ahead of us in some figure at a point."""
    ways = list(point.get("ways"))
    own = [way for way in _OUR_WAYS if way in ways][-1]
    ours = point.inside("ways", own)
    for peer in (way for way in ways if way not in _OUR_WAYS):
        theirs, found = point.inside("ways", peer), []
        rates = [each.spread("at_once", "tokens_per_s").median for each in (theirs, ours)]
        if rates[0] > rates[1]:
            found.append("tokens/s: {:.0f} to {:.0f}".format(*rates))
        for figure, what in (("first_token_s", "first token"), ("token_s", "a token")):
            for level, of in (("p50", "median"), ("p99", "99th percentile")):
                times = [each.optional_spread("poisson", figure, level) for each in (theirs, ours)]
                late = [1e3 * each.median for each in times if each is not None]
                if len(late) == 2 and late[0] < late[1]:
                    found.append("{}, {}: {:.0f} to {:.0f} ms".format(what, of, *late))
        if found:
            yield (
                f"jaxserve ({own}) is behind {peer} at {point.get('connections'):,} connections in "
                f"{'; '.join(found)}."
            )


HTTP = Table(
    what="{arguments[workload]} requests to {arguments[model]}, each on its connection: tokens "
    "a second when all come at once, latencies of Poisson arrivals, whose rate is the same for "
    "all ways: half of the requests a second that jaxserve answers in process",
    rows=each("points", ..., "ways", ...),
    columns=_HTTP_COLUMNS,
    below=_http_below,
)


def _structured_workload(whole: Place) -> str:
    given = whole.get("arguments")
    what = f"{given['num_requests'] or '32'} {given['workload']} requests at once, {given['model']}"
    return f"{what}, greedy" if given.get("temperature") == 0 else what


def _of_without(row: Place) -> str:
    return show_in("{above0[costs][throughput_share]:~.1%}", row) if row.at == ("with",) else ""


STRUCTURED = Table(
    what=_structured_workload,
    rows=lambda whole: map(whole.inside, ("with", "without")),
    columns=(
        ("answers", "{at[0]} schemas"),
        ("output tokens/s", "{tokens_per_s:@~.0f}"),
        ("a token", "{token_s:~.2f ms}"),
        ("masks a token, on host threads", "{mask_token_s:~.2f ms}"),
        ("forced", "{forced_share:~.0%}"),
        ("device idle for the host", "{host_gap_share:~.0%}"),
        ("of the throughput without", _of_without),
    ),
)


# ---- what a trainer asks for ----


_SCORES = (
    "`rt.score` differs in {scores[num_different]:.0f} of {scores[num_answers]:.0f} answers, and "
    "in {processed_scores[num_different]:.0f} of {processed_scores[num_answers]:.0f} for the "
    "distributions that tokens were drawn from. Output tokens a second: "
    "{cost[deterministic][tokens_per_s]:~.0f} with `deterministic=True`, "
    "{cost[ordinary][tokens_per_s]:~.0f} without."
)
INVARIANCE = Table(
    what="{num_requests:.0f} {arguments[workload]} requests, {arguments[model]}, in random batches",
    rows=each("ways", ...),
    columns=(
        ("steps", "{at[1]}"),
        ("pairs", "{num_pairs:@,.0f}"),
        ("different", "{num_different:,.0f}"),
        ("preempted", "{num_preemptions:,.0f}"),
        ("pages restored", "{num_pages_in:,.0f}"),
        ("cached tokens", "{num_prefix_hit:,.0f}"),
    ),
    below=lambda whole: [show_in(_SCORES, whole)],
)


def _drawn_tokens(whole: Place) -> str:
    first = next(iter(whole.get("modes")))
    return show_in(
        f"{{modes[{first}][num_tokens]:,}} drawn tokens of {{arguments[model]}} in each mode, "
        "beside the trainer's log-probabilities in float32",
        whole,
    )


RESIDUAL = Table(
    what=_drawn_tokens,
    rows=each("modes", ...),
    columns=(
        ("serving", "{at[1]}"),
        ("tokens with other bits", "{num_different:@,.0f}"),
        ("mean difference", "{mean:.1e}"),
        ("largest", "{largest:.1e}"),
        ("largest error of a ratio", "{largest_ratio_error:.1e}"),
        ("KL divergence per token", "{kl:.1e}"),
    ),
)


def _adapter_rows(whole: Place) -> Iterator[Place]:
    yield whole.inside("without")
    yield from each("cases", ...)(whole)


def _num_adapters(row: Place) -> str:
    return "none can be loaded" if row.at == ("without",) else f"{row.get('num_adapters'):,}"


def _kept_by_adapters(row: Place) -> str:
    return "1.00" if row.at == ("without",) else show_in("{share_of_throughput:~.2f}", row)


def _adapters_below(whole: Place) -> list[str]:
    cases = each("cases", ...)(whole)
    kept = [(row, row.number("share_of_throughput", "median")) for row in cases]
    short = [
        f"{row.get('num_adapters'):,} adapters ({share:.3f})"
        for row, share in kept
        if share < _LEAST_ADAPTED
    ]
    said = f"Less than {_LEAST_ADAPTED} of the throughput without: {'; '.join(short)}."
    load = show_in("Loading one from arrays takes {load_s:.2f s} (median).", whole)
    return [said if short else "", load]


def _adapters_workload(whole: Place) -> str:
    what = (
        "{arguments[num_requests]} {arguments[workload]} requests at once, {arguments[model]}, "
        "adapters of rank {arguments[rank]} for all matrices"
    )
    kept = whole.get("arguments").get("adapter_dtype") and ", kept in {arguments[adapter_dtype]}"
    return show_in(what + (kept or ""), whole)


ADAPTERS = Table(
    what=_adapters_workload,
    rows=_adapter_rows,
    columns=(
        ("adapters in the batch", _num_adapters),
        ("output tokens/s", "{tokens_per_s:@~.0f}"),
        ("of the throughput without", _kept_by_adapters),
    ),
    below=_adapters_below,
)

_SPECULATING = each("cases", ..., "is_faster_by", ...)


def _of_proposer(cell: str) -> Cell:
    return lambda row: show_in(cell, row.above(2).inside(row.at[3]))


def _speculation_below(whole: Place) -> list[str]:
    behind = []
    for row in _SPECULATING(whole):
        faster, case = row.number("median"), row.above(2)
        if faster < _LEAST_SPECULATING:
            place = f"{case.get('kind')}, {case.get('num_requests'):,} requests, {row.at[3]}"
            behind.append(f"{place} ({faster:.2f})")
    said = f"Less than {_LEAST_SPECULATING} of the speed without: {'; '.join(behind)}."
    parts = [said if behind else ""]
    for kind, _ in whole.items("peers"):
        parts += [
            f"Every engine with its own lookup decoding, prompts of the kind `{kind}`:",
            engines(whole.inside("peers", kind)),
        ]
    return parts


SPECULATION = Table(
    what="Greedy answers of {arguments[output_tokens]} tokens by {arguments[model]}, with and "
    "without speculation in turns, the same tokens",
    rows=_SPECULATING,
    columns=(
        ("prompts", "{above2[kind]}"),
        ("requests", "{above2[num_requests]:,}"),
        ("proposer", "{at[3]}"),
        ("output tokens/s without", "{above2[without][tokens_per_s]:@~.0f}"),
        ("with", _of_proposer("{tokens_per_s:@~.0f}")),
        ("faster by", "{here:~.2f}"),
        ("proposals accepted", _of_proposer("{accepted_share:~.0%}")),
    ),
    below=_speculation_below,
)

# Page -> kind of result, in the order of the page -> heading and table. An entry here shows a new
# kind: on its page, and on stderr when it is measured. Offline results share a table.
PAGES: dict[str, dict[str, tuple[str, Callable[[Place], str] | None]]] = {
    "docs/results/throughput.md": {
        "offline": ("All requests at once", None),
        "http": ("What HTTP costs, and other servers", HTTP),
        "structured": ("What grammars cost", STRUCTURED),
        "startup": ("From an empty process to the first token", STARTUP),
        "compile_times": ("Compiling for a GPU", COMPILE_TIMES),
        "loading": ("Memory for loading a checkpoint", LOADING),
        "planning": ("The host's time a step", PLANNING),
        "quality": ("Quality of weights in few bits", QUALITY),
    },
    "docs/results/policies.md": {
        "policies": ("Policies on one workload", POLICIES),
        "policies_grid": ("Policies over workloads and pools, simulated", POLICIES_GRID),
        "online": ("Latency against load", ONLINE),
        "flover": ("Flover's section VI", papers.FLOVER),
        "simulate": ("Predicted and measured", SIMULATE),
        "s3": ("S3's models on its GPU, simulated", papers.S3),
    },
    "docs/results/conversations.md": {
        "conversations": ("Conversations that come back", papers.CONVERSATIONS),
        "pensieve": ("Pensieve's models on its GPUs, simulated", papers.PENSIEVE),
        "scattered": ("Attention over scattered pages", papers.SCATTERED),
        "restore": ("Coming back from the host", papers.RESTORE),
    },
    "docs/results/exegpt.md": {
        "exegpt": ("ExeGPT's models on its clusters, estimated and simulated", exegpt.simulated),
        "exegpt_bounds": ("Plans beside hand-tuned batch sizes", exegpt.bounds),
        "exegpt_measured": ("ExeGPT's schedules on devices, and simulated", exegpt.MEASURED),
        "exegpt_drift": ("Lengths that drift, simulated", exegpt.DRIFT),
    },
    "docs/results/cells.md": {
        "cells": ("Cellular batching beside graph batching", cells.batching),
        "cells_host": ("The host's work on cells", cells.HOST),
    },
    "docs/results/lengths.md": {
        "predictor": ("Predicted lengths of answers", PREDICTOR),
        "probe": ("What is left of answers", PROBE),
    },
    "docs/results/rollouts.md": {
        "invariance": ("Bits of a request in any two batches", INVARIANCE),
        "residual": ("Log-probabilities of sampling beside the trainer's", RESIDUAL),
        "adapters": ("What adapters cost", ADAPTERS),
        "speculation": ("What speculation gains", SPECULATION),
    },
    "docs/models.md": {"coverage": ("Architectures of transformers", COVERAGE)},
    "docs/results/devices.md": {
        "sharding": ("What plans send, and how full pipelines are", SHARDING),
        "roles": ("Prompts and answers in separate replicas", ROLES),
        "gpu_check": ("One GPU in ten minutes", GPU_CHECK),
    },
}
TABLES = {kind: entry for kinds in PAGES.values() for kind, entry in kinds.items()}


def tables(kind: str, results: Sequence[Place]) -> list[str]:
    """Return the Markdown of each result of a kind; the first of the offline ones has their table.

    Raises:
      ResultFileError: a file lacks a field of its kind, or the runs of its figures.
    """
    _, make = TABLES[kind]
    return offline(results) if make is None else [make(result) for result in results]


def show_result(data: dict[str, Any]) -> None:
    """Print the table of a result that was just measured on stderr; nothing for other kinds."""
    kind = data["benchmark"]
    if kind in TABLES:
        try:
            (text,) = tables(kind, [Place(Path(f"{kind}.json"), data, "")])
        except ResultFileError as error:  # what the budget did not allow is not there
            text = str(error)
        show(Markdown(text))
