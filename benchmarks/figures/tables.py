"""The table of every kind of result; each row that holds numbers links to its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.common.repeats import Spread
from benchmarks.figures import cells, exegpt, papers
from benchmarks.figures.render import (
    Column,
    Place,
    Table,
    caption,
    drawn,
    each,
    joined,
    key,
    lost,
    name,
    number,
    runs,
    shown,
    spread,
    table,
    text,
    where,
    words,
)
from benchmarks.figures.results import Keys, Result, bound_name, is_quantised

# Throughput that adapters are to keep, of that without any.
_LEAST_ADAPTED = 0.8
# Lookup decoding costs at most this share of the throughput without it.
_LEAST_SPECULATING = 0.98
# Ways to the model that are our own; a peer is compared with the last of them that was measured.
_OUR_WAYS = ("in process", "socket", "http", "completions")


# ---- requests at once, and other engines ----


def offline(results: Sequence[Result], link: Callable[[Result], str]) -> list[str]:
    """Return one table for all results, and one for the peers of each result that has them."""
    columns: tuple[Column, ...] = (
        ("workload", _offline_workload),
        ("runs", lambda row: runs(row.result)),
        ("output tokens/s", spread("output_tokens_per_s", form=".0f", links=True)),
        ("of the bound", _reached),
        ("device waits for host", spread("host_gap_share", form=".1%")),
        *(
            (
                f"{kind} start",
                number("startup", kind, "ready_s", form=".0f", unit=" s", optional=True),
            )
            for kind in ("cold", "warm")
        ),
    )
    rows = [[cell(Place(each, link(each))) for _, cell in columns] for each in results]
    first = [table([heading for heading, _ in columns], rows), *[""] * (len(results) - 1)]
    return [
        joined(above, peers(result, link(result)) if result.has_peers else "")
        for above, result in zip(first, results, strict=True)
    ]


def _offline_workload(row: Place) -> str:
    result = row.result
    return (
        f"{row.number('num_requests'):.0f} {row.get('workload')} requests, "
        f"{_model(result)} in {row.get('precision')}, policy {row.get('policy')}, {where(result)}"
    )


def _reached(row: Place) -> str:
    if is_quantised(row.result):  # the bound is that of weights in the model's dtype
        return ""
    return f"{row.number('bound', 'reached'):.0%} of {bound_name(row.result)}"


def _model(result: Result) -> str:
    weights = f", weights in {result.get('quantize')}," if is_quantised(result) else ""
    return f"{result.get('model')}{weights}"


def peers(result: Result, link: str) -> str:
    """Return every engine on the requests of an offline result, and where ours is behind."""
    what = (
        f"{result.number('num_requests'):.0f} {result.get('workload')} requests, "
        f"{_model(result).strip(',')}, every engine in turns"
    )
    how = f"medians of {result.number('compare', 'repeats'):.0f} whole runs (least to most)"
    return joined(caption(result, what, link, how=how), engines(result, ("compare",), link))


def engines(result: Result, at: Keys, link: str) -> str:
    """Return every engine of the comparison `at`, and a sentence of where ours is behind."""
    rows, behind = [], []
    fewer = list(result.get(*at).get("fewer") or ())
    for engine, figures in result.items(*at, "engines"):
        if figures.get("error"):
            failed = [name(engine), f"[failed]({link})", " ".join(figures["error"].split()), ""]
            rows.append([*failed, *[""] * len(fewer)])
            continue
        own = Place(result, link, (*at, "engines", engine))
        faster_by = own.spread("jaxserve_is_faster_by")
        cells = [
            name(engine),
            shown(own.spread("output_tokens_per_s"), ".0f", link=link),
            shown(faster_by, ".2f"),
            shown(own.spread("startup_s"), ".1f", " s"),
        ]
        if faster_by.median < 1:
            behind.append(f"{name(engine)}: {shown(faster_by, '.2f')} times its speed")
        for count in fewer:
            of_fewer = Place(result, link, (*at, "fewer", count, engine))
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
        ("output tokens/s", spread("output_tokens_per_s", form=".0f", links=True)),
        ("latency, median", spread("latency_s", "p50", form=".1f", unit=" s", optional=True)),
        ("99th percentile", spread("latency_s", "p99", form=".1f", unit=" s", optional=True)),
        (
            "first token",
            spread("time_to_first_token_s", "p50", form=".2f", unit=" s", optional=True),
        ),
        ("average batch", spread("average_batch", form=".1f", optional=True)),
        ("iterations", spread("engine", "num_iterations", form=".0f", optional=True)),
        ("preempted", spread("num_preemptions", form=".0f", optional=True)),
    ),
    below=lost("output tokens/s", _POLICY_ROWS, lambda row: row.spread("output_tokens_per_s")),
)

_ONLINE_ROWS = each("policies", ..., "points", ...)
ONLINE = Table(
    what="{arguments[num_requests]} {arguments[workload]} requests a rate, {arguments[model]}",
    rows=_ONLINE_ROWS,
    columns=(
        ("policy", key(1)),
        ("requests/s", number("rate", form=".2g", links=True)),
        ("served", spread("requests_per_s", form=".2g")),
        ("tokens/s", spread("output_tokens_per_s", form=".0f")),
        ("p90 s/token", spread("normalised_latency_s", "p90", form=".3f", unit=" s")),
        ("p90 first token", spread("time_to_first_token_s", "p90", form=".2f", unit=" s")),
        ("within limits", spread("goodput", "share", form=".0%", optional=True)),
    ),
    below=lost(
        "p90 s/token",
        _ONLINE_ROWS,
        lambda row: row.spread("normalised_latency_s", "p90"),
        policy=1,
        place=lambda row: f"at {row.number('rate'):.2g} requests/s",
        is_lower_better=True,
    ),
)

SIMULATE = Table(
    what="Measured and simulated",
    rows=each("policies", ...),
    columns=(
        ("policy", words("policy")),
        ("measured tokens/s", spread("measured", "output_tokens_per_s", form=".0f", links=True)),
        ("predicted", spread("predicted", "output_tokens_per_s", form=".0f")),
        ("error", spread("error", "output_tokens_per_s", form="+.1%")),
        ("measured p99 latency, s", spread("measured", "latency_s", "p99", form=".1f", links=True)),
        ("predicted", spread("predicted", "latency_s", "p99", form=".1f")),
        ("error", spread("error", "latency_p99_s", form="+.1%")),
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
    given = whole.get("arguments")
    memory = "no host memory" if given["no_host"] else "host memory"
    return (
        f"auto, {given['num_requests']} requests all at once, {given['max_slots']} slots, "
        f"{memory}, Llama 3 8B on an A100 80 GB as rooflines"
    )


POLICIES_GRID = Table(
    what=_grid_workload,
    rows=_grid_rows,
    columns=(
        ("workload", text("workload")),
        ("pool", text("pool")),
        ("predictor", text("predictor")),
        ("tokens/s over the best other", _of_best_other(max, "output_tokens_per_s", links=True)),
        ("p99 over it", _of_best_other(min, "latency_s", "p99", links=False)),
    ),
    how="simulated",
)


# ---- lengths ----


def _predictor_columns(whole: Place) -> tuple[Column, ...]:
    def outgrown(level: str) -> Callable[[Place], str]:
        return lambda row: "{missed:.1%} ({reserved_tokens:.0f})".format(
            **row.get("promises", level)
        )

    return (
        ("predictor", text("name")),
        ("accuracy", number("accuracy", form=".1%", links=True)),
        ("wrong by, buckets", number("wrong_by", form=".2f")),
        ("error, tokens", number("error_tokens", form=".0f")),
        ("too short", number("under_prediction", form=".1%")),
        *(
            (f"outgrown at {float(level):.0%}", outgrown(level))
            for level in whole.get("contenders", 0, "promises")
        ),
    )


def _predictor_data(whole: Place) -> str:
    edges = whole.get("bucket_edges")
    return (
        f"{whole.number('num_examples', 'test'):.0f} {whole.get('settings', 'data')} prompts, "
        f"{len(edges) - 1} buckets up to {edges[-1]} tokens; outgrown reservations and, in "
        "brackets, their mean length in tokens"
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
    return [("", text("name")), *columns]


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
        ("first token", spread("first_token_s", form=".1f", unit=" s", links=True)),
        ("imports", spread("imports_s", form=".1f", unit=" s")),
        ("tokenizer", spread("tokenizer_s", form=".1f", unit=" s")),
        ("weights", spread("weights_s", form=".1f", unit=" s")),
        ("page pool", spread("cache_s", form=".1f", unit=" s")),
        ("first answer", spread("first_answer_s", form=".1f", unit=" s")),
        ("second answer", spread("second_answer_s", form=".1f", unit=" s")),
        (
            "executables",
            lambda row: (
                f"{row.spread('num_loaded').median:.0f} loaded, "
                f"{row.spread('num_compiled').median:.0f} compiled"
            ),
        ),
        ("resident", spread("resident_bytes", form=".2f", unit=" GB", per=1e9)),
    ),
)

LOADING = Table(
    what="A random checkpoint",
    rows=each(),
    columns=(
        (
            "checkpoint",
            lambda row: (
                f"{row.get('shape')}, {row.get('dtype')}, {row.number('num_shards'):.0f} shards"
            ),
        ),
        ("size", number("checkpoint_bytes", form=".2f", unit=" GB", per=1e9)),
        (
            "peak host memory",
            lambda row: f"{row.spread('peak_host_bytes').median / 1e9:.2f} GB",
        ),
        ("over the size", spread("ratio", form=".2f", links=True)),
        ("from disk in", spread("load_s", form=".0f", unit=" s")),
    ),
)


def _compiled_model(whole: Place) -> str:
    given = whole.get("arguments")
    target = "an H100" if given["target"] == "h100" else "its own CPU"
    return (
        f"Executables of a Llama of the shape {given['shape']} with {given['layout']} "
        f"layers, {given['max_slots']} slots and steps of {given['max_step_tokens']:,} "
        f"tokens, compiled for {target} without a cache"
    )


_COMPILED = {"serial": "one after the other", "parallel": "on a start's threads"}
COMPILE_TIMES = Table(
    what=_compiled_model,
    rows=lambda whole: map(whole.inside, _COMPILED),
    columns=(
        ("compiled", lambda row: _COMPILED[str(row.at[0])]),
        ("executables", lambda row: f"{len(row.get('executables')):,}"),
        ("all are made after", number("wall_s", form=".0f", unit=" s", links=True)),
        ("sum of the seconds of each", number("sum_s", form=".0f", unit=" s")),
    ),
)


def _quality_rows(whole: Place) -> Iterator[Place]:
    yield whole.inside("unquantised")
    yield from each("formats", ...)(whole)


def _of_format(cell: Callable[[Place], str]) -> Callable[[Place], str]:
    """Leave the cell of the unquantised model empty."""
    return lambda row: "" if row.at == ("unquantised",) else cell(row)


def _perplexity_ratio(row: Place) -> str:
    base = row.above(0).number("unquantised", "perplexity")
    return f"{row.number('perplexity') / base:.3f}"


QUALITY = Table(
    what="{num_tokens:,.0f} tokens of held-out ShareGPT texts, {model} in {dtype}",
    rows=_quality_rows,
    columns=(
        ("weights", lambda row: str(row.at[-1])),
        ("size", number("weights_bytes", form=".0f", unit=" MB", per=1e6)),
        ("perplexity", number("perplexity", form=".3f", links=True)),
        ("ratio", _of_format(_perplexity_ratio)),
        ("KL divergence, nats", _of_format(number("divergence", form=".4f"))),
        ("same greedy token", _of_format(number("agreement", form=".1%"))),
    ),
    how="one pass, which nothing random is in",
    below=lambda whole: [
        f"Worse than it should be: {problem}." for _, problem in whole.result.items("warnings")
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
        ("refused", lambda row: f"`{row.at[-1]}`"),
        ("class", text("class_name")),
        ("nearest family", text("nearest")),
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
        ("`model_type`", lambda row: f"`{row.at[-1]}`"),
        ("class of transformers", text("class_name")),
        ("family here", lambda row: f"`{row.get('family')}`"),
        ("relative error of logits", number("error", form=".0e", links=True)),
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
        ("policy", words("policy")),
        ("slots", text("max_slots")),
        ("waiting", text("num_waiting", form=",")),
        ("context", number("max_context", form=",.0f", optional=True)),
    ]
    figures = (
        ("planning, median", spread("planning_ms", "p50", form=".2f", links=True)),
        ("99th percentile", spread("planning_ms", "p99", form=".2f")),
        ("worst", spread("planning_ms", "max", form=".1f")),
        ("host, median", spread("host_ms", "p50", form=".2f")),
    )

    def of(checkout: str, cell: Callable[[Place], str]) -> Callable[[Place], str]:
        return lambda row: cell(row.above(0).inside("points", checkout, row.at[-1]))

    names = {"here": "this commit", "against": f"{whole.get('arguments')['against']}"}
    for checkout, _ in whole.result.items("points"):
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
        ("plan", text("plan")),
        ("bytes a decode iteration", number("decode", "bytes", form=",.0f", links=True)),
        ("of the least", _of_least),
        ("bubble", number("pipeline", "bubble", form=".1%", optional=True)),
        ("ideal", number("pipeline", "ideal_bubble", form=".1%", optional=True)),
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
        ("output tokens/s", spread("output_tokens_per_s", form=".0f", links=True)),
        *(
            (f"{what}, {of}", spread(figure, level, form=".2f", unit=" s"))
            for what, figure in _FLEET_TIMES.items()
            for of, level in (("median", "p50"), ("p99", "p99"))
        ),
    ),
)

GPU_CHECK = Table(
    what="Results and their bars",
    rows=each("bars", ...),
    columns=(
        ("what", text("what")),
        ("wanted", text("wanted")),
        ("found", lambda row: row.get("found") and row.linked(row.get("found"))),
        ("verdict", text("verdict")),
    ),
    how="one run",
)


# ---- HTTP and grammars ----


def _of_http(
    costs: str, figure: str, form: str, unit: str = "", per: float = 1.0
) -> Callable[[Place], str]:
    """Show a cost of HTTP at the row's number of connections."""
    cost = spread(figure, form=form, unit=unit, per=per)
    return lambda row: cost(row.above(2).inside(costs)) if row.at[3] == "http" else ""


def _http_columns(_: Place) -> list[Column]:
    columns: list[Column] = [
        ("connections", lambda row: f"{row.above(2).get('connections'):,}"),
        ("way", lambda row: str(row.at[3])),
        ("output tokens/s", spread("at_once", "tokens_per_s", form=".0f", links=True)),
    ]
    for what, figure in (("first token", "first_token_s"), ("a token", "token_s")):
        for heading, level in ((f"{what}, median", "p50"), ("99th percentile", "p99")):
            cell = spread("poisson", figure, level, form=".1f", unit=" ms", per=1e-3, optional=True)
            columns.append((heading, cell))
    columns += [
        (
            "arrivals, of the requests that the way itself answers at once",
            spread("poisson", "share_of_own_rate", form=".0%", optional=True),
        ),
        (
            "of the first token outside the engine, mean",
            _of_http("costs", "outside_engine_s", form=".1f", unit=" ms", per=1e-3),
        ),
    ]
    for base, costs in (("in process", "costs"), ("over sockets", "costs_beside_socket")):
        columns += [
            (f"of the throughput {base}", _of_http(costs, "throughput_share", form=".1%")),
            (
                f"first token later than {base}, median",
                _of_http(costs, "first_token_later_s", form=".1f", unit=" ms", per=1e-3),
            ),
        ]
    return columns


def _http_below(whole: Place) -> Iterator[str]:
    for point in each("points", ...)(whole):
        yield from _behind_peers(point)
    for peer, reason in whole.result.items("failed"):
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
                times = [
                    each.result.optional_spread(each.at, "poisson", figure, level)
                    for each in (theirs, ours)
                ]
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
    columns=_http_columns,
    below=_http_below,
)


def _structured_workload(whole: Place) -> str:
    given = whole.get("arguments")
    what = f"{given['num_requests'] or '32'} {given['workload']} requests at once, {given['model']}"
    return f"{what}, greedy" if given.get("temperature") == 0 else what


def _of_without(row: Place) -> str:
    if row.at != ("with",):
        return ""
    return spread("throughput_share", form=".1%")(row.above(0).inside("costs"))


STRUCTURED = Table(
    what=_structured_workload,
    rows=lambda whole: map(whole.inside, ("with", "without")),
    columns=(
        ("answers", lambda row: f"{row.at[0]} schemas"),
        ("output tokens/s", spread("tokens_per_s", form=".0f", links=True)),
        ("a token", spread("token_s", form=".2f", unit=" ms", per=1e-3)),
        (
            "masks a token, on host threads",
            spread("mask_token_s", form=".2f", unit=" ms", per=1e-3),
        ),
        ("forced", spread("forced_share", form=".0%")),
        ("device idle for the host", spread("host_gap_share", form=".0%")),
        ("of the throughput without", _of_without),
    ),
)


# ---- what a trainer asks for ----


def _scores(whole: Place) -> list[str]:
    rates = {
        mode: shown(whole.inside("cost", mode).spread("tokens_per_s"), ".0f")
        for mode in ("deterministic", "ordinary")
    }
    own, drawn = (
        f"{whole.number(part, 'num_different'):.0f} of {whole.number(part, 'num_answers'):.0f}"
        for part in ("scores", "processed_scores")
    )
    return [
        f"`rt.score` differs in {own} answers, and in {drawn} for the distributions that tokens "
        f"were drawn from. Output tokens a second: {rates['deterministic']} with "
        f"`deterministic=True`, {rates['ordinary']} without."
    ]


INVARIANCE = Table(
    what="{num_requests:.0f} {arguments[workload]} requests, {arguments[model]}, in random batches",
    rows=each("ways", ...),
    columns=(
        ("steps", lambda row: str(row.at[1])),
        ("pairs", number("num_pairs", form=",.0f", links=True)),
        ("different", number("num_different", form=",.0f")),
        ("preempted", number("num_preemptions", form=",.0f")),
        ("pages restored", number("num_pages_in", form=",.0f")),
        ("cached tokens", number("num_prefix_hit", form=",.0f")),
    ),
    below=_scores,
)


def _drawn_tokens(whole: Place) -> str:
    first = next(iter(whole.get("modes")))
    return (
        f"{whole.number('modes', first, 'num_tokens'):,.0f} drawn tokens of "
        f"{whole.get('arguments')['model']} in each mode, beside the trainer's log-probabilities "
        "in float32"
    )


RESIDUAL = Table(
    what=_drawn_tokens,
    rows=each("modes", ...),
    columns=(
        ("serving", lambda row: str(row.at[1])),
        ("tokens with other bits", number("num_different", form=",.0f", links=True)),
        ("mean difference", number("mean", form=".1e")),
        ("largest", number("largest", form=".1e")),
        ("largest error of a ratio", number("largest_ratio_error", form=".1e")),
        ("KL divergence per token", number("kl", form=".1e")),
    ),
)


def _ratio(row: Place, *keys: str) -> Spread:
    """Return a spread that the file itself has, of ratios of runs in the same turn."""
    low, high = row.get(*keys, "range")
    return Spread(row.number(*keys, "median"), low, high, row.result.repeats)


def _adapter_rows(whole: Place) -> Iterator[Place]:
    yield whole.inside("without")
    yield from each("cases", ...)(whole)


def _num_adapters(row: Place) -> str:
    return "none can be loaded" if row.at == ("without",) else f"{row.get('num_adapters'):,}"


def _kept_by_adapters(row: Place) -> str:
    return "1.00" if row.at == ("without",) else shown(_ratio(row, "share_of_throughput"), ".2f")


def _adapters_below(whole: Place) -> list[str]:
    kept = [(row, _ratio(row, "share_of_throughput").median) for row in each("cases", ...)(whole)]
    short = [
        f"{row.get('num_adapters'):,} adapters ({share:.3f})"
        for row, share in kept
        if share < _LEAST_ADAPTED
    ]
    said = f"Less than {_LEAST_ADAPTED} of the throughput without: {'; '.join(short)}."
    load = f"Loading one from arrays takes {whole.number('load_s'):.2f} s (median)."
    return [said if short else "", load]


def _adapters_workload(whole: Place) -> str:
    given = whole.get("arguments")
    dtype = given.get("adapter_dtype")
    return (
        f"{given['num_requests']} {given['workload']} requests at once, "
        f"{given['model']}, adapters of rank {given['rank']} for all matrices"
        + (f", kept in {dtype}" if dtype else "")
    )


ADAPTERS = Table(
    what=_adapters_workload,
    rows=_adapter_rows,
    columns=(
        ("adapters in the batch", _num_adapters),
        ("output tokens/s", spread("tokens_per_s", form=".0f", links=True)),
        ("of the throughput without", _kept_by_adapters),
    ),
    below=_adapters_below,
)

_SPECULATING = each("cases", ..., "is_faster_by", ...)


def _of_way(way: str | None, *keys: str, form: str, links: bool = False) -> Callable[[Place], str]:
    """Show a figure of one way of a case; None for the proposer of the row."""
    cell = spread(*keys, form=form, links=links)
    return lambda row: cell(row.above(2).inside(way or row.at[3]))


def _speculation_below(whole: Place) -> list[str]:
    behind = []
    for row in _SPECULATING(whole):
        faster, case = _ratio(row).median, row.above(2)
        if faster < _LEAST_SPECULATING:
            place = f"{case.get('kind')}, {case.get('num_requests'):,} requests, {row.at[3]}"
            behind.append(f"{place} ({faster:.2f})")
    said = f"Less than {_LEAST_SPECULATING} of the speed without: {'; '.join(behind)}."
    parts = [said if behind else ""]
    for kind, _ in whole.result.items("peers"):
        parts += [
            f"Every engine with its own lookup decoding, prompts of the kind `{kind}`:",
            engines(whole.result, ("peers", kind), whole.link),
        ]
    return parts


SPECULATION = Table(
    what="Greedy answers of {arguments[output_tokens]} tokens by {arguments[model]}, with and "
    "without speculation in turns, the same tokens",
    rows=_SPECULATING,
    columns=(
        ("prompts", lambda row: row.above(2).get("kind")),
        ("requests", lambda row: f"{row.above(2).get('num_requests'):,}"),
        ("proposer", lambda row: str(row.at[3])),
        (
            "output tokens/s without",
            _of_way("without", "tokens_per_s", form=".0f", links=True),
        ),
        ("with", _of_way(None, "tokens_per_s", form=".0f", links=True)),
        ("faster by", lambda row: shown(_ratio(row), ".2f")),
        ("proposals accepted", _of_way(None, "accepted_share", form=".0%")),
    ),
    below=_speculation_below,
)

# Heading and table of each kind of result; offline results share a table.
TABLES: dict[str, tuple[str, Callable[[Result, str], str] | None]] = {
    "offline": ("All requests at once", None),
    "policies": ("Policies on one workload", POLICIES),
    "online": ("Latency against load", ONLINE),
    "conversations": ("Conversations that come back", papers.CONVERSATIONS),
    "flover": ("Flover's section VI", papers.FLOVER),
    "simulate": ("Predicted and measured", SIMULATE),
    "predictor": ("Predicted lengths of answers", PREDICTOR),
    "probe": ("What is left of answers", PROBE),
    "s3": ("S3's models on its GPU, simulated", papers.S3),
    "pensieve": ("Pensieve's models on its GPUs, simulated", papers.PENSIEVE),
    "scattered": ("Attention over scattered pages", papers.SCATTERED),
    "restore": ("Coming back from the host", papers.RESTORE),
    "startup": ("From an empty process to the first token", STARTUP),
    "compile_times": ("Compiling for a GPU", COMPILE_TIMES),
    "loading": ("Memory for loading a checkpoint", LOADING),
    "planning": ("The host's time a step", PLANNING),
    "sharding": ("What plans send, and how full pipelines are", SHARDING),
    "gpu_check": ("One GPU in ten minutes", GPU_CHECK),
    "exegpt": ("ExeGPT's models on its clusters, estimated and simulated", exegpt.simulated),
    "exegpt_bounds": ("Plans beside hand-tuned batch sizes", exegpt.bounds),
    "exegpt_measured": ("ExeGPT's schedules on devices, and simulated", exegpt.MEASURED),
    "exegpt_drift": ("Lengths that drift, simulated", exegpt.DRIFT),
    "cells": ("Cellular batching beside graph batching", cells.batching),
    "cells_host": ("The host's work on cells", cells.HOST),
    "roles": ("Prompts and answers in separate replicas", ROLES),
    "http": ("What HTTP costs, and other servers", HTTP),
    "structured": ("What grammars cost", STRUCTURED),
    "policies_grid": ("Policies over workloads and pools, simulated", POLICIES_GRID),
    "invariance": ("Bits of a request in any two batches", INVARIANCE),
    "residual": ("Log-probabilities of sampling beside the trainer's", RESIDUAL),
    "adapters": ("What adapters cost", ADAPTERS),
    "speculation": ("What speculation gains", SPECULATION),
    "quality": ("Quality of weights in few bits", QUALITY),
    "coverage": ("Architectures of transformers", COVERAGE),
}


def tables(kind: str, results: Sequence[Result], link: Callable[[Result], str]) -> list[str]:
    """Return the Markdown of each result of a kind; the first of the offline ones has their table.

    Args:
      link: returns the address of the file as the page sees it.

    Raises:
      ResultFileError: a file lacks a field of its kind, or the runs of its figures.
    """
    _, make = TABLES[kind]
    if make is None:
        return offline(results, link)
    return [make(result, link(result)) for result in results]
