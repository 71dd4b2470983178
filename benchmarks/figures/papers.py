"""Tables of the Flover, S3 and Pensieve papers, of conversations, and of their pages."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.counters import PrefixCounts
from benchmarks.figures.render import (
    Cell,
    Column,
    Field,
    Table,
    behind_by,
    key,
    linked,
    lost,
    show_in,
    table,
)
from benchmarks.figures.results import Place, by_policy

# The policies of the S3 paper's tables, in the order of their numbers.
_S3_POLICIES = ("orca", "s3", "s3_oracle")


def _flover_rows(whole: Place) -> list[Place]:
    return [points[-1] for points in by_policy(whole, "constant").values()]


def _over_instances(row: Place) -> str:
    slowest = by_policy(row.above(0), "constant").get("concurrent_instances")
    if not slowest:
        return ""
    return f"{slowest[-1].spread('wall_s').median / row.spread('wall_s').median:.1f}"


FLOVER = Table(
    what="{arguments[max_requests]} requests of {arguments[output_tokens]} output tokens, one "
    "every {interval_s:.2f} s, {arguments[model]}",
    rows=_flover_rows,
    columns=(
        ("policy", "{policy:words}"),
        ("total time, s", "{wall_s:@~.1f}"),
        ("faster than concurrent instances by", _over_instances),
        ("output tokens/s", "{output_tokens_per_s:~.0f}"),
    ),
)


def _of_paper(figure: str) -> Cell:
    def cell(row: Place) -> str:
        _, model, policy = row.at
        values = row.above(0).get("paper").get(model, {}).get(figure, ())
        theirs = dict(zip(_S3_POLICIES, values, strict=False))
        return f"{theirs[policy]:.0f}" if policy in theirs else ""

    return cell


def _within_slo(row: Place) -> str:
    _, model, policy = row.at
    rates = row.above(0).get("slo").get(model, {}).get(policy, ())
    within = [each["requests_within_per_s"] for each in rates]
    return f"{max(within):.2f}" if within else ""


S3 = Table(
    what="{arguments[num_requests]} requests of ShareGPT's lengths, all at once, A100 80 GB as "
    "rooflines",
    rows="models.*.*",
    columns=(
        ("model", "{at[1]}"),
        ("policy", key()),
        ("tokens/s", "{output_tokens_per_s:@.0f}"),
        ("paper", _of_paper("output_tokens_per_s")),
        ("batch", "{average_batch:@.0f}"),
        ("paper", _of_paper("average_batch")),
        ("iterations", "{num_iterations:@.0f}"),
        ("paper", _of_paper("num_iterations")),
        ("requests/s within 0.1875 s a token, at the best rate", _within_slo),
    ),
    how="simulated",
    below=lost(
        "output tokens/s", "models.*.*", "output_tokens_per_s", place="{at[1]}", is_measured=False
    ),
)


# ---- conversations ----

_LAST_POINTS = "sets.*.policies.*.points.-1"
_ROUNDS = "{above2[min_rounds]} or more, {above2[reaction_s]:g} s"
_PANEL = "{above2[figure]}, {above2[model]}"


def _at_bound(row: Place) -> str:
    """Show the requests served at the bound, "over" the highest rate if p90 stays within it."""
    curve = row.above(4)
    served, most = curve.get("requests_per_s_at_bound"), curve.inside("points", -1)
    if served is None:
        return f"[over {most.number('requests_per_s'):.2f}]({row.link})"
    return linked(served, ".2f", row.link)


def _served_at(whole: Place) -> str:
    return f"requests/s at {whole.number('arguments', 'bound'):g} s a token"


def _prefix(row: Place) -> PrefixCounts:
    return PrefixCounts.of(row.get("engine"))


def _conversations_columns(whole: Place) -> tuple[Column, ...]:
    return (
        ("rounds, reaction", _ROUNDS),
        ("policy", key(3)),
        (_served_at(whole), _at_bound),
        ("of stateless", "{above4[of_stateless]:.2f?}"),
        ("requests/s at the highest rate", "{requests_per_s:~.2f}"),
        ("p90 s/token there", "{normalised_latency_s[p90]:~.3f s}"),
        ("hit", lambda row: f"{_prefix(row).hit_share:.0%}"),
        ("on the host", lambda row: f"{_prefix(row).hit_on_host_share:.0%}"),
        ("tokens evicted", lambda row: f"{_prefix(row).evicted:.0f}"),
    )


def _simulated_or_runs(whole: Place) -> str | None:
    return "simulated with measured step times" if whole.get("arguments")["simulated"] else None


CONVERSATIONS = Table(
    what="{arguments[num_conversations]} conversations a rate, {arguments[model]}",
    rows=_LAST_POINTS,
    columns=_conversations_columns,
    how=_simulated_or_runs,
    below=lost(
        "p90 s/token at the highest rate",
        _LAST_POINTS,
        "normalised_latency_s[p90]",
        policy=3,
        place=_ROUNDS,
        is_lower_better=True,
    ),
)


def _thesis_gain(row: Place) -> str:
    gain = row.above(2).get("gain")
    return f"{gain:g}" if row.at[3] == "pensieve" and gain else ""


def _pensieve_columns(whole: Place) -> tuple[Column, ...]:
    return (
        ("figure", _PANEL),
        ("rounds, reaction", _ROUNDS),
        ("policy", key(3)),
        (_served_at(whole), _at_bound),
        ("of stateless", "{above4[of_stateless]:.2f?}"),
        ("thesis", _thesis_gain),
        ("p90 s/token at the lowest rate", "{points[0][normalised_latency_s][p90]:.3f s}"),
    )


def _reached_bounds(whole: Place) -> list[Place]:
    return [
        curve
        for curve in whole.each("sets.*.policies.*")
        if "auto" in curve.above(2).get("policies")
        if curve.get("requests_per_s_at_bound") is not None
    ]


_LOST_AT_BOUND = lost(
    _served_at, _reached_bounds, "requests_per_s_at_bound", place=_PANEL, is_measured=False
)


def _pensieve_below(whole: Place) -> list[str]:
    header = ("figure 3.14", "requests/s", "hit with LRU", "with cost over time")
    header += ("tokens recomputed with LRU", "with cost over time", "fewer")
    rows = list(_evictions(whole))
    return [*_LOST_AT_BOUND(whole), table(header, rows) if rows else ""]


def _evictions(whole: Place) -> Iterator[list[str]]:
    """Yield the rates of figure 3.14 that both policies played and at which LRU evicted tokens."""
    for panel in whole.each("sets.*"):
        if not {"pensieve_lru", "pensieve"} <= panel.get("policies").keys():
            continue
        lru, ours = (
            {
                each.number("rate"): _prefix(each)
                for each in panel.each(f"policies.{policy}.points.*")
            }
            for policy in ("pensieve_lru", "pensieve")
        )
        for rate in sorted(lru.keys() & ours.keys()):
            before, after = lru[rate], ours[rate]
            if before.evicted:
                yield [
                    panel.get("model"),
                    f"{rate:.2f}",
                    f"{before.hit_share:.1%}",
                    f"{after.hit_share:.1%}",
                    linked(before.evicted, ".0f", whole.link),
                    f"{after.evicted:.0f}",
                    f"{1 - after.evicted / before.evicted:.1%}",
                ]


PENSIEVE = Table(
    what="ShareGPT's conversations for {arguments[seconds]:.0f} s, A100 80 GB as "
    "{arguments[efficiency]:.0%} of its rooflines",
    rows="sets.*.policies.*",
    columns=_pensieve_columns,
    how="simulated",
    below=_pensieve_below,
)
SCATTERED = Table(
    what="{arguments[batch]} rows of {arguments[queries]} tokens, milliseconds",
    rows="contexts.*",
    columns=(
        ("context", "{context:.0f}"),
        ("over pages", "{over_pages_s:@~.2f /ms}"),
        ("copied out", "{copied_out_s:~.2f /ms}"),
        ("one token at a time", "{one_token_at_a_time_s:~.2f /ms}"),
    ),
)
RESTORE = Table(
    what="Pages of {page_bytes:.2f MB}, {arguments[model]}",
    rows="points.*",
    columns=(
        ("slot", "{situation:words}"),
        ("tokens", "{length:,}"),
        ("pages come", "{way:words}"),
        ("first token, ms", "{first_token_s:@~.0f /ms}"),
        ("others lost, ms", "{others_lost_s:~.0f /ms}"),
    ),
)
SECOND_TURNS = Table(
    what="First token of a turn of {arguments[new]} new tokens, a model with recurrent layers",
    rows="rows.*",
    columns=(
        ("history", "{length:,}"),
        ("new tokens alone, ms", "{alone[first_token_s]:@~.0f /ms}"),
        ("kept state, ms", "{kept[first_token_s]:@~.0f /ms}"),
        ("computed again, ms", "{computed[first_token_s]:@~.0f /ms}"),
        ("kept over alone", "{kept_over_alone:.2f}"),
    ),
)


def _states_losses(whole: Place) -> list[str]:
    """Return where our retention of states is behind the best of the others."""
    figures = {"prompt tokens found": ("hit",), "p99 of the first token": ("first_token_s", "p99")}
    sentences = []
    for what, keys in figures.items():
        texts, is_lower_better = [], keys != ("hit",)
        for row in whole.each("rows.*"):
            found = {p.at[-1]: Field(p, keys).spread() for p in row.each("policies.*")}
            best = (min if is_lower_better else max)(found, key=lambda each: found[each].median)
            share = behind_by(found["ours"], found[best], is_lower_better=is_lower_better)
            if share is not None:
                touches = " (ranges overlap)" if found["ours"].overlaps(found[best]) else ""
                at = show_in("{shape}, {workload}, {num_states} states", row)
                texts.append(f"{at}: {share:.1%} behind {best}{touches}")
        behind = f"ours is behind: {'; '.join(texts)}" if texts else "ours is behind nothing"
        sentences.append(f"In {what}, {behind}.")
    return sentences


STATES = Table(
    what="{arguments[num_requests]} requests a run, one A100 80 GB as a roofline, a grid of "
    "{arguments[grid]} tokens, {arguments[host_states]} states on the host; tokens of prompts "
    "found, and computed again although an earlier request had them",
    rows="rows.*.policies.*",
    columns=(
        ("shape", "{above2[shape]}"),
        ("requests", "{above2[workload]}"),
        ("states", "{above2[num_states]}"),
        ("kept by", key()),
        ("found", "{hit:@~.1%}"),
        ("computed again", "{recomputed_tokens:~,.0f}"),
        ("first token, p50", "{first_token_s[p50]:~.0f ms}"),
        ("p99", "{first_token_s[p99]:~.0f ms}"),
    ),
    below=_states_losses,
)
