"""The table of every kind of result; each row that holds numbers links to its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.figures import cells, exegpt, papers
from benchmarks.figures.render import (
    Cell,
    Column,
    Field,
    Table,
    behind_by,
    caption,
    drawn,
    if_at,
    joined,
    key,
    lost,
    name,
    runs,
    show_in,
    table,
    where,
)
from benchmarks.figures.results import Place, ResultFileError, is_quantised

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
    above = [drawn(columns, lambda _: results, results[0]), *[""] * (len(results) - 1)]
    return [
        joined(text, peers(result) if result.has_peers else "")
        for text, result in zip(above, results, strict=True)
    ]


def _offline_workload(row: Place) -> str:
    bits = ", weights in {quantize}," if is_quantised(row) else ""
    what = "{num_requests} {workload} requests, {model}" + bits + " in {precision}, policy {policy}"
    return f"{show_in(what, row)}, {where(row)}"


def _reached(row: Place) -> str:
    if is_quantised(row):  # the bound is that of weights in the model's dtype
        return ""
    return show_in("{bound[reached]:.0%} of roofline", row)


def peers(result: Place) -> str:
    """Return every engine on the requests of an offline result, and where ours is behind."""
    bits = ", weights in {quantize}" if is_quantised(result) else ""
    what = "{num_requests} {workload} requests, {model}" + bits + ", every engine in turns"
    how = "medians of {compare[repeats]} whole runs (least to most)"
    first = caption(result, show_in(what, result), how=show_in(how, result))
    return joined(first, engines(result.inside("compare")))


def engines(compared: Place) -> str:
    """Return every engine of a comparison, and a sentence of where ours is behind."""
    rows, behind = [], []
    fewer = list(compared.get().get("fewer") or ())
    for own in compared.each("engines.*"):
        engine = name(str(own.at[-1]))
        if own.get("error"):
            why = " ".join(own.get("error").split())
            rows.append([engine, compared.linked("failed"), why, "", *[""] * len(fewer)])
            continue
        row = ["{output_tokens_per_s:@~.0f}", "{jaxserve_is_faster_by:~.2f}", "{startup_s:~.1f s}"]
        rows.append([engine, *(show_in(cell, own) for cell in row)])
        places = {
            "": own,
            **{f" at {n} of them": compared.inside("fewer", n, own.at[-1]) for n in fewer},
        }
        for at, place in places.items():
            faster = show_in("{jaxserve_is_faster_by:~.2f}", place)
            if at:
                rows[-1].append(f"{show_in('{output_tokens_per_s:~.0f}', place)}, {faster} times")
            if place.spread("jaxserve_is_faster_by").median < 1:
                behind.append(f"{engine}{at}: {faster} times its speed")
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
    pool = f", a page pool of {given['kv_memory']}" if given.get("kv_memory") else ""
    slots = f", at most {given['max_slots']} at once" if given.get("max_slots") else ""
    what = f"{given['num_requests']} {given['workload']} requests, {when}, {given['model']}"
    return f"{what}{pool}{slots}"


POLICIES = Table(
    what=_policies_workload,
    rows="policies.*",
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
    below=lost("output tokens/s", "policies.*", "output_tokens_per_s"),
)
ONLINE = Table(
    what="{arguments[num_requests]} {arguments[workload]} requests a rate, {arguments[model]}",
    rows="policies.*.points.*",
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
        "policies.*.points.*",
        "normalised_latency_s[p90]",
        policy=1,
        place="at {rate:.2g} requests/s",
        is_lower_better=True,
    ),
)


def _of_best_other(best: Callable[..., float], *keys: str, link: bool = False) -> Cell:
    """Show a figure over the best of the other policies on the same workload and pool."""

    def cell(row: Place) -> str:
        place = row.get("workload"), row.get("pool")
        others = [
            other.number(*keys)
            for other in row.above(0).each("rows.*")
            if (other.get("workload"), other.get("pool")) == place and other.get("policy") != "auto"
        ]
        ratio = f"{row.number(*keys) / best(others):.3f}"
        return row.linked(ratio) if link else ratio

    return cell


def _grid_workload(whole: Place) -> str:
    memory = "no host memory" if whole.get("arguments", "no_host") else "host memory"
    what = "auto, {arguments[num_requests]} requests all at once, {arguments[max_slots]} slots, "
    return show_in(f"{what}{memory}, Llama 3 8B on an A100 80 GB as rooflines", whole)


POLICIES_GRID = Table(
    what=_grid_workload,
    rows=lambda whole: [row for row in whole.each("rows.*") if row.get("policy") == "auto"],
    columns=(
        ("workload", "{workload}"),
        ("pool", "{pool}"),
        ("predictor", "{predictor}"),
        ("tokens/s over the best other", _of_best_other(max, "output_tokens_per_s", link=True)),
        ("p99 over it", _of_best_other(min, "latency_s", "p99")),
    ),
    how="simulated",
)


def _arena_columns(whole: Place) -> list[Column]:
    loads, last = whole.get("loads"), whole.get("loads")[-1]
    over = "{{loads[{0}][over_baseline][{1}]:~.2f}}"
    return [
        ("trace", "{at[1]}"),
        ("policy", key()),
        *((f"{p} at {load}", over.format(load, p)) for p in ("p50", "p99") for load in loads),
        (f"tokens/s at {last}", f"{{loads[{last}][output_tokens_per_s]:@~.0f}}"),
        (f"within bounds at {last}", f"{{loads[{last}][goodput]:~.0%}}"),
    ]


def _arena_losses(whole: Place) -> list[str]:
    """Return where `auto` is behind the best of the policies that know no more than it does."""
    sentences = []
    for p in ("p50", "p99"):
        texts = []
        for trace in whole.each("traces.*"):
            for load in whole.get("loads"):
                found = {
                    str(row.at[-1]): Field(row, ("loads", load, "over_baseline", p)).spread()
                    for row in trace.each("policies.*")
                    if not str(row.at[-1]).startswith("auto_")
                }
                best = min(found, key=lambda policy: found[policy].median)
                share = behind_by(found["auto"], found[best], is_lower_better=True)
                if share is not None:
                    texts.append(f"{trace.at[-1]} at {load} by {share:.0%} ({name(best)})")
        behind = f"behind the best policy on {', '.join(texts)}" if texts else "behind no policy"
        sentences.append(f"In {p} of the latency, auto is {behind}.")
    return [" ".join(sentences)] if "auto" in whole.each("traces.*")[0].get("policies") else []


ARENA = Table(
    what="{arguments[num_requests]} requests a run, {arguments[model]} on one "
    "{arguments[device]}, a page pool of {arguments[kv_memory]}, simulated; latency over that of "
    "vllm like on the same requests, at loads in shares of what vllm like serves at once",
    rows="traces.*.policies.*",
    columns=_arena_columns,
    below=_arena_losses,
)


def published(whole: Place) -> str:
    """Return one table for each paper: ratios to its baseline, with the paper's own figure."""
    what = "{arguments[num_requests]} requests a run, {arguments[model]} on one "
    what += "{arguments[device]}, a page pool of {arguments[kv_memory]}, "
    what += "{arguments[max_slots]} slots, simulated; ratios to the first policy of a table"
    parts = [caption(whole, show_in(what, whole))]
    for paper in whole.each("papers.*"):
        rows = paper.each("policies.*")
        columns: list[Column] = [("policy", key())]
        columns += [
            (figure, f"{{over_baseline[{figure}]:@~.2f}}")
            for figure in rows[0].get("over_baseline")
        ]
        said = f"`{paper.at[-1]}`: {paper.get('workload')}. The paper reports "
        parts += [f"{said}{paper.get('reports')}.", drawn(columns, lambda _, r=rows: r, paper)]
    return joined(*parts)


# ---- lengths ----

WRONG_LENGTHS = Table(
    what="{arguments[num_requests]} requests at once, {arguments[model]}, auto, simulated",
    rows="lengths.*.*",
    columns=(
        ("lengths", "{at[1]}"),
        ("predictions", key()),
        ("tokens/s over none", "{over_none[output_tokens_per_s]:~.3f}"),
        ("p50 over none", "{over_none[p50_s]:~.3f}"),
        ("p99 over none", "{over_none[p99_s]:~.3f}"),
        ("tokens/s over vllm_like", "{over_vllm_like[output_tokens_per_s]:~.3f}"),
        ("tokens/s over s3", "{over_s3[output_tokens_per_s]:~.3f}"),
    ),
)


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
    what=_predictor_data, rows="contenders.*", columns=_predictor_columns, how="one training"
)


def _probe_rows(whole: Place) -> list[Place]:
    """Return the first figure of each way to predict."""
    rows = {row.get("name"): row for row in reversed(whole.each("figures.*"))}
    return list(reversed(rows.values()))


def _probe_columns(whole: Place) -> list[Column]:
    figures = {(each.get("name"), each.get("elapsed")): each for each in whole.each("figures.*")}

    def at(elapsed: int | None) -> Cell:
        def cell(row: Place) -> str:
            other = figures.get((row.get("name"), elapsed))
            if other is None:
                return ""
            error = "{error_tokens:@.0f}" if other == row else "{error_tokens:.0f}"
            return show_in(f"{error} ({{accuracy:.0%}})", other)

        return cell

    found = dict.fromkeys(elapsed for _, elapsed in figures)
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
    rows="cold warm",
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
START_COMMAND = Table(
    what="`jaxserve generate` with one prompt, {model}",
    rows="starts.*.*",
    columns=(
        ("start", "{at[1]}"),
        ("checkout", key()),
        ("wall time", "{wall_s:@~.2f s}"),
        ("CPU time", "{cpu_s:~.2f s}"),
        ("peak memory", "{peak_bytes:~.2f GB}"),
        ("imports", "{imports_s:.2f s?}"),
        ("modules", "{num_imported:.0f?}"),
    ),
)
LOADING = Table(
    what="A random checkpoint",
    rows=lambda whole: [whole],
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
    rows=" ".join(_COMPILED),
    columns=(
        ("compiled", lambda row: _COMPILED[str(row.at[0])]),
        ("executables", lambda row: f"{len(row.get('executables')):,}"),
        ("all are made after", "{wall_s:@.0f s}"),
        ("sum of the seconds of each", "{sum_s:.0f s}"),
    ),
)


def _perplexity_ratio(row: Place) -> str:
    if row.at == ("unquantised",):
        return ""
    return f"{row.number('perplexity') / row.above(0).number('unquantised', 'perplexity'):.3f}"


QUALITY = Table(
    what="{num_tokens:,.0f} tokens of held-out ShareGPT texts, {model} in {dtype}",
    rows="unquantised formats.*",
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
    return lambda whole: [
        row for row in whole.each("architectures.*") if row.get("outcome") in outcomes
    ]


def _is_missing(row: Place) -> str:
    unread = row.get("unread")
    if row.get("nearest") is None:
        return row.get("reason").partition("; ")[0].replace("|", "/")
    if not unread:
        return "other formulas with the same fields"
    more = f" and {len(unread) - _MAX_UNREAD} more" if len(unread) > _MAX_UNREAD else ""
    return ", ".join(f"`{field}`" for field in unread[:_MAX_UNREAD]) + more


_REFUSED: tuple[Column, ...] = (
    ("refused", "`{at[1]}`"),
    ("class", "{class_name}"),
    ("nearest family", "{nearest}"),
    ("what it does not read, or the reason", _is_missing),
)
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
    below=lambda whole: [drawn(_REFUSED, _architectures("refused", "disagrees", "fails"), whole)],
)


def _slowest_points(whole: Place) -> list[Place]:
    """Return the point of each policy and context whose planning takes longest."""
    slowest: dict[Any, tuple[float, Place]] = {}
    for row in whole.each("points.here.*"):
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

    def of(checkout: str, cell: str) -> Cell:
        return lambda row: show_in(cell, row.above(0).inside("points", checkout, row.at[-1]))

    names = {"here": "this commit", "against": f"{whole.get('arguments')['against']}"}
    for checkout, _ in whole.items("points"):
        for what, cell in (
            ("planning, median", "{planning_ms[p50]:@~.2f}"),
            ("99th percentile", "{planning_ms[p99]:~.2f}"),
            ("worst", "{planning_ms[max]:~.1f}"),
            ("host, median", "{host_ms[p50]:~.2f}"),
        ):
            columns.append((f"{what}, {names[checkout]}", of(checkout, cell)))
    return columns


PLANNING = Table(
    what="Milliseconds a step, simulated device; of each policy and context the slowest point",
    rows=_slowest_points,
    columns=_planning_columns,
)


MEMORY = Table(
    what="KV of one sequence that decodes, in times what its layers need",
    rows="rows.*",
    columns=(
        ("layers of", "{shape}"),
        ("context", "{context:,.0f}"),
        ("held", "{held:.2f}"),
        ("reserved", "{reserved:.2f}"),
        ("held in one group", "{held_in_one_group:.2f}"),
    ),
    how="simulated",
)

WINDOWS = Table(
    what="{arguments[num_requests]} requests at once, {arguments[policy]}, a page pool of "
    "{arguments[kv_memory]}; prompts of {arguments[prompt_tokens]:,} tokens and answers of "
    "{arguments[min_output_tokens]:,} to {arguments[output_tokens]:,}, {arguments[layers]} layers, "
    "five of six with a window of {arguments[window]} tokens",
    rows="pages.*",
    columns=(
        ("pages", key()),
        ("sequences at once, mean", "{num_running[mean]:@~.1f}"),
        ("most", "{num_running[max]:~.0f}"),
        ("preemptions", "{num_preemptions:~.0f}"),
        ("tokens computed again", "{num_recomputed:~,.0f}"),
        ("output tokens/s", "{tokens_per_s:@~.0f}"),
    ),
    below=lambda whole: [
        show_in("Grouped over one group, tokens/s: {tokens_per_s_of_one_group:~.2f}.", whole)
    ],
)


def _of_least(row: Place) -> str:
    sent, least = row.number("decode", "bytes"), row.number("decode", "least_bytes")
    return f"{sent / least:.2f}" if least else ""


SHARDING = Table(
    what="{rows:.0f} sequences of a model of {model[layers]} layers",
    rows="runs.*",
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
_FLEET_TIMES = (
    ("first token", "first_token_s"),
    ("answer", "latency_s"),
    ("between tokens", "gap_s"),
)
ROLES = Table(
    what="{arguments[num_requests]} prompts of {arguments[prompt_tokens]} tokens, answers of "
    "{arguments[output_tokens]}, arrivals {arguments[arrivals]}",
    rows="fleets.*",
    columns=(
        ("replicas", lambda row: _FLEETS[str(row.at[1])]),
        ("output tokens/s", "{output_tokens_per_s:@~.0f}"),
        *(
            (f"{what}, {of}", f"{{{figure}[{level}]:~.2f s}}")
            for what, figure in _FLEET_TIMES
            for of, level in (("median", "p50"), ("p99", "p99"))
        ),
    ),
)
GPU_CHECK = Table(
    what="Results and their bars",
    rows="bars.*",
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
    return if_at("http", 3, cell, above=2)


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
    ("of the first token outside the engine, mean", _of_http("{costs[outside_engine_s]:~.1f ms}")),
    ("of the throughput in process", _of_http("{costs[throughput_share]:~.1%}")),
    ("first token later than in process, median", _of_http("{costs[first_token_later_s]:~.1f ms}")),
    ("of the throughput over sockets", _of_http("{costs_beside_socket[throughput_share]:~.1%}")),
    (
        "first token later than over sockets, median",
        _of_http("{costs_beside_socket[first_token_later_s]:~.1f ms}"),
    ),
)


def _http_below(whole: Place) -> Iterator[str]:
    for point in whole.each("points.*"):
        yield from _behind_peers(point)
    for peer, reason in whole.items("failed"):
        yield f"{peer} failed: {reason}"


def _behind_peers(point: Place) -> Iterator[str]:
    """Yield a sentence for each peer that is ahead of us in some figure at a point."""
    ways = list(point.get("ways"))
    own = [way for way in _OUR_WAYS if way in ways][-1]
    for peer in (way for way in ways if way not in _OUR_WAYS):
        both, found = [point.inside("ways", way) for way in (peer, own)], []
        rates = [each.spread("at_once", "tokens_per_s").median for each in both]
        if rates[0] > rates[1]:
            found.append("tokens/s: {:.0f} to {:.0f}".format(*rates))
        for figure, what in (("first_token_s", "first token"), ("token_s", "a token")):
            for level, of in (("p50", "median"), ("p99", "99th percentile")):
                times = [each.optional_spread("poisson", figure, level) for each in both]
                late = [1e3 * each.median for each in times if each is not None]
                if len(late) == 2 and late[0] < late[1]:
                    found.append("{}, {}: {:.0f} to {:.0f} ms".format(what, of, *late))
        if found:
            at = f"{point.get('connections'):,} connections"
            yield f"jaxserve ({own}) is behind {peer} at {at} in {'; '.join(found)}."


HTTP = Table(
    what="{arguments[workload]} requests to {arguments[model]}, each on its connection: tokens "
    "a second when all come at once, latencies of Poisson arrivals, whose rate is the same for "
    "all ways: half of the requests a second that jaxserve answers in process",
    rows="points.*.ways.*",
    columns=_HTTP_COLUMNS,
    below=_http_below,
)


def _structured_workload(whole: Place) -> str:
    given = whole.get("arguments")
    what = f"{given['num_requests'] or '32'} {given['workload']} requests at once, {given['model']}"
    return f"{what}, greedy" if given.get("temperature") == 0 else what


STRUCTURED = Table(
    what=_structured_workload,
    rows="with without",
    columns=(
        ("answers", "{at[0]} schemas"),
        ("output tokens/s", "{tokens_per_s:@~.0f}"),
        ("a token", "{token_s:~.2f ms}"),
        ("masks a token, on host threads", "{mask_token_s:~.2f ms}"),
        ("forced", "{forced_share:~.0%}"),
        ("device idle for the host", "{host_gap_share:~.0%}"),
        ("of the throughput without", if_at("with", 0, "{above0[costs][throughput_share]:~.1%}")),
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
    rows="ways.*",
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
_DRAWN = (
    "{num_tokens:,} drawn tokens of {above0[arguments][model]} in each mode, beside the trainer's "
    "log-probabilities in float32"
)
RESIDUAL = Table(
    what=lambda whole: show_in(_DRAWN, whole.each("modes.*")[0]),
    rows="modes.*",
    columns=(
        ("serving", "{at[1]}"),
        ("tokens with other bits", "{num_different:@,.0f}"),
        ("mean difference", "{mean:.1e}"),
        ("largest", "{largest:.1e}"),
        ("largest error of a ratio", "{largest_ratio_error:.1e}"),
        ("KL divergence per token", "{kl:.1e}"),
    ),
)


def _with_adapters(without: str, cell: str) -> Cell:
    return lambda row: without if row.at == ("without",) else show_in(cell, row)


def _adapters_below(whole: Place) -> list[str]:
    short = [
        show_in("{num_adapters:,} adapters ({share_of_throughput[median]:.3f})", row)
        for row in whole.each("cases.*")
        if row.number("share_of_throughput", "median") < _LEAST_ADAPTED
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
    rows="without cases.*",
    columns=(
        ("adapters in the batch", _with_adapters("none can be loaded", "{num_adapters:,}")),
        ("output tokens/s", "{tokens_per_s:@~.0f}"),
        ("of the throughput without", _with_adapters("1.00", "{share_of_throughput:~.2f}")),
    ),
    below=_adapters_below,
)

_SPECULATING = "cases.*.is_faster_by.*"


def _of_proposer(cell: str) -> Cell:
    return lambda row: show_in(cell, row.above(2).inside(row.at[3]))


def _speculation_below(whole: Place) -> list[str]:
    said = "{above2[kind]}, {above2[num_requests]:,} requests, {at[3]} ({median:.2f})"
    slow = [row for row in whole.each(_SPECULATING) if row.number("median") < _LEAST_SPECULATING]
    behind = "; ".join(show_in(said, row) for row in slow)
    parts = [f"Less than {_LEAST_SPECULATING} of the speed without: {behind}." if slow else ""]
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


# ---- kinds that are on no page: shown on stderr, and read by `scripts.gpu_check` ----

EMBEDDINGS = Table(
    what="{arguments[num_texts]} texts of {num_tokens:,} tokens",
    rows="jaxserve transformers",
    columns=(
        ("engine", key()),
        ("texts/s", "{texts_per_s:~.1f}"),
        ("tokens/s", "{tokens_per_s:~,.0f}"),
        ("times transformers", if_at("jaxserve", 0, "{above0[times_transformers]:~.2f}")),
    ),
)


def _either(row: Place, checkout: str) -> str:
    figures = row.above(2).get(checkout)
    return f"{figures[row.at[3]]:.4g}"


BASELINE = Table(
    what="This checkout beside another one",
    rows="measurements.*.ratios.*",
    columns=(
        ("measurement", "{at[1]}"),
        ("figure", "{at[3]}"),
        ("here", lambda row: _either(row, "here")),
        ("against", lambda row: _either(row, "against")),
        ("ratio", "{median:.3f}"),
        ("range", "{range[0]:.3f} to {range[1]:.3f}"),
    ),
)
_MACHINE = (
    "copy {machine[copy_bytes_per_s]:.0f GB}/s, products {machine[product_flops_per_s]:.2f T}FLOP/s"
)
_PEERS = ("jax_paged", "cudnn_dense", "cudnn_paged")
KERNELS = Table(
    what=_MACHINE,
    rows="shapes.* moves.* products.* groups.*",
    columns=(
        ("", "{at[0]}"),
        ("shape", "{shape}"),
        ("us", "{seconds:,.1f /us}"),
        ("GB/s", "{bytes_per_s:,.0f /GB}"),
        ("of bound", "{of_bound:.0%}"),
        ("TFLOP/s", "{flops_per_s:.2f /T?}"),
        ("error", "{error:.1e?}"),
        ("XLA, us", "{xla_s:,.1f /us?}"),
        ("dense, us", "{dense_s:,.1f /us?}"),
        ("loop, us", "{loop_s:,.1f /us?}"),
        *((f"{peer}, us", f"{{peers[{peer}][seconds]:,.1f /us?}}") for peer in _PEERS),
    ),
    how="one run",
)
KERNEL_PEERS = Table(
    what="Attention",
    rows="shapes.*.peers.*",
    columns=(
        ("shape", "{above2[shape]}"),
        ("peer", key()),
        ("us", "{seconds:,.1f /us?}"),
        ("error", "{error:.1e?}"),
        ("", "{reason:?}"),
    ),
    how="one run",
)
KERNELS_CPU = Table(
    what="{machine[flops_per_s]:.2f /GB} Gflop/s, {machine[bytes_per_s]:.2f GB}/s",
    rows="cases.*",
    columns=(
        ("case", "{at[1]}"),
        ("ms", "{ms:.2f}"),
        ("least ms", "{least_ms:.2f}"),
        ("Gflop/s", "{gflop_per_s:.2f}"),
        ("GB/s", "{gb_per_s:.2f}"),
        ("of roofline", "{of_roofline:.2f}"),
    ),
)
TUNE = Table(
    what="{kind}, {heads}",
    rows="tried.*",
    columns=(
        ("tried", "{place}={value}"),
        ("us", lambda row: ", ".join(f"{s * 1e6:,.1f}" for s in row.get().get("seconds", ()))),
        ("score", "{score:.3f?}"),
        ("", "{reason:?}"),
    ),
    how="one run",
)
_PARTS = {
    "products_s": "matrix products",
    "attention_s": "attention and KV writes",
    "sampling_s": "choosing tokens",
    "other_s": "everything else",
    "step_s": "the step in the run",
}
DECODE_STEP: tuple[Column, ...] = (
    ("one decode step", lambda row: _PARTS[str(row.at[-1])]),
    ("ms", "{here:.1f /ms}"),
    ("share", lambda row: f"{row.number() / row.above(1).number('step_s'):.0%}"),
)
_BATCHES: tuple[Column, ...] = (
    ("batch", "{batch_size}"),
    ("ms a step", "{decode_step_s:.3f /ms?}{does_not_fit:?}"),
    ("tokens/s", "{decode_tokens_per_s:,.0f?}"),
    ("of bound", "{of_bound:.0%?}"),
    ("host gap", "{host_gap_share:.1%?}"),
    ("tokens/s with prompts", "{output_tokens_per_s:,.0f?}"),
)


def _decode_below(whole: Place) -> Iterator[str]:
    for row in whole.each("prefill.*"):
        prompts = "{prompts} prompts of {prompt_tokens}: {tokens_per_s:,.0f} tokens/s, "
        yield show_in(prompts + "{of_bound:.0%} of the bound", row)
    for row in whole.each("traces.*") if "traces" in whole.data else ():
        yield show_in("batch {batch_size}: device idle {idle_share:.1%}", row)


DECODE = Table(
    what="{model}, {precision}, KV in {kv_dtype}",
    rows="batches.*",
    columns=_BATCHES,
    how="one run",
    below=_decode_below,
)
DECODE_PEER = Table(
    what="transformers, {model}, {precision}, {attention}",
    rows="batches.*",
    columns=_BATCHES,
    how="one run",
)
CHOICES = Table(
    what="{layers} layers of {model}, flags: {xla_flags}",
    rows="choices.*",
    columns=(("layers", "{layout}"), *_BATCHES),
    how="one run",
)
PREDICTED_DECODE: tuple[Column, ...] = (
    ("batch", "{batch_size}"),
    ("context", "{context:,}"),
    ("products", "{products_s:.2f /ms}"),
    ("keys and values", "{keys_and_values_s:.2f /ms}"),
    ("head", "{head_s:.2f /ms}"),
    ("launches", "{launches_s:.2f /ms}"),
    ("step, ms", "{step_s:.2f /ms}"),
    ("tokens/s", lambda row: f"{row.get('batch_size') / row.get('step_s'):,.0f}"),
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
        "s3": ("S3's models on its GPU, simulated", papers.S3),
        "memory": ("Memory of a sequence by context", MEMORY),
        "windows": ("Sequences with windows in one pool", WINDOWS),
    },
    "docs/results/arena.md": {
        "arena": ("Policies on synthetic traces", ARENA),
        "published": ("What papers report, in shape", published),
    },
    "docs/results/conversations.md": {
        "conversations": ("Conversations that come back", papers.CONVERSATIONS),
        "pensieve": ("Pensieve's models on its GPUs, simulated", papers.PENSIEVE),
        "scattered": ("Attention over scattered pages", papers.SCATTERED),
        "restore": ("Coming back from the host", papers.RESTORE),
        "second_turns": ("Second turns of a model with recurrent layers", papers.SECOND_TURNS),
        "states": ("Which states of recurrent layers are kept, simulated", papers.STATES),
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
        "wrong_lengths": ("Wrong predictions", WRONG_LENGTHS),
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
# Kinds that are shown on stderr alone.
SHOWN: dict[str, Callable[[Place], str]] = {
    "embeddings": EMBEDDINGS,
    "baseline": BASELINE,
    "start_command": START_COMMAND,
    "kernels": KERNELS,
    "kernel_peers": KERNEL_PEERS,
    "kernels.cpu": KERNELS_CPU,
    "tune": TUNE,
    "decode": DECODE,
    "decode_peer": DECODE_PEER,
    "choices": CHOICES,
    "predicted_decode": lambda whole: drawn(PREDICTED_DECODE, "rows.*", whole),
}


def tables(kind: str, results: Sequence[Place]) -> list[str]:
    """Return the Markdown of each result of a kind; the first of the offline ones has their table.

    Raises:
      ResultFileError: a file lacks a field of its kind, or the runs of its figures.
    """
    make = SHOWN[kind] if kind in SHOWN else TABLES[kind][1]
    return offline(results) if make is None else [make(result) for result in results]


def show_result(data: dict[str, Any]) -> None:
    """Print the table of a result that was just measured on stderr; nothing for other kinds."""
    kind = data["benchmark"]
    if kind in TABLES or kind in SHOWN:
        try:
            whole = Place(Path(f"{kind}.json"), data, "")
            (text,) = tables(kind, [whole])
            if kind == "offline" and data["decode_step"]:
                text = joined(text, drawn(DECODE_STEP, "decode_step.*", whole))
        except ResultFileError as error:  # what the budget did not allow is not there
            text = str(error)
        console = Console(stderr=True)
        console.width = max(console.width, 120)  # also without a terminal
        console.print(Markdown(text))
