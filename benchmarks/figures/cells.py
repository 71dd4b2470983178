"""Tables of cellular batching and of other policies and systems."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures.render import Cell, Table, caption, drawn, joined, key, name, show_in
from benchmarks.figures.results import Place

# Goals: our peak over that of the best baseline, about that of the thesis.
WANTED = {"lstm": 1.25, "seq2seq": 1.6, "treelstm": 1.8}
# Goal: our peak over that of the ideal, on identical trees.
WANTED_OF_IDEAL = 0.7
# Goal: nodes a second of the host on one core.
WANTED_NODES = 100_000
_IDEAL = "identical_graphs"
_OURS = "jaxserve"

HOST = Table(
    what=f"Everything but the device, on one thread (wanted {WANTED_NODES:,} nodes/s)",
    rows="points.*",
    columns=(
        ("application", "{application}"),
        ("nodes/s", "{nodes_per_s:@~,.0f}"),
        ("nodes/s of the policy alone", "{scheduled_per_s:~,.0f}"),
        ("requests/s", "{requests_per_s:~,.0f}"),
    ),
)


def batching(whole: Place) -> str:
    """Return a row for each policy of each workload, and one for each other system."""
    parts = []
    if whole.get("compared"):
        what = "Hidden size {sizes[hidden_size]}, sentences as in {arguments[lengths]}"
        parts += [
            caption(whole, show_in(what, whole)),
            drawn(_GOALS, _with_baseline, whole),
            _lost(whole),
            drawn(_POLICIES, "compared.*.peaks_per_s.*", whole),
        ]
    if whole.data.get("compare"):
        folds = "; ours computes products with embeddings when it loads the model"
        how = "" if whole.get("arguments").get("unfolded") else folds
        what = "Other systems, hidden size {sizes[hidden_size]}, the same requests and weights"
        parts += [
            caption(whole, show_in(what, whole) + how),
            drawn(_SYSTEMS, "compare.*", whole),
            *_behind(whole),
        ]
    return joined(*parts)


def _with_baseline(whole: Place) -> list[Place]:
    return [row for row in whole.each("compared.*") if row.get("best") is not None]


def _against(figure: str, form: str, named: str) -> Cell:
    """Show a figure of the comparison with the policy that a field of the row names."""
    return lambda row: show_in(f"{{{figure}[{row.get(named)}]:{form}}}", row)


def _wanted(row: Place) -> str:
    wanted = WANTED.get(row.get("application"))
    return "" if wanted is None else f"{wanted:g}"


def _over_ideal(row: Place) -> str:
    ideal = row.optional("peak_over", _IDEAL)
    return "" if ideal is None else f"{ideal:.2f} (wanted {WANTED_OF_IDEAL:g})"


_GOALS = (
    ("workload", "{application}"),
    ("", "{how}"),
    ("best baseline", "{best:words}"),
    ("wanted", _wanted),
    ("ours over it", _against("peak_over", "@.2f", "best")),
    ("best within 0.5 s", "{best_within:words}"),
    ("ours over it", _against("within_over", ".2f?", "best_within")),
    ("p90 lower by (wanted 37% to 90%)", _against("p90_lower_by", ".0%?", "best")),
    ("ours over the ideal", _over_ideal),
)


def _lost(whole: Place) -> str:
    """Return where our peak is behind a baseline or the target; "" for nowhere."""
    found = []
    for row in _with_baseline(whole):
        best, place = row.get("best"), show_in("{application} ({how})", row)
        over, wanted = row.number("peak_over", best), WANTED.get(row.get("application"))
        if over < 1:
            found.append(f"{place}: {over:.2f} of {name(best)}")
        elif wanted is not None and over < wanted:
            found.append(f"{place}: {over:.2f} times {name(best)}, wanted {wanted:g}")
        lower = row.optional("p90_lower_by", best)
        if lower is not None and lower < 0:
            found.append(f"{place}: p90 {-lower:.0%} higher than that of {name(best)}")
        ideal = row.optional("peak_over", _IDEAL)
        if ideal is not None and ideal < WANTED_OF_IDEAL:
            found.append(f"{place}: {ideal:.2f} of the ideal, wanted {WANTED_OF_IDEAL:g}")
    return f"Lost or short: {'; '.join(found)}." if found else ""


def _of_policy(figure: str, form: str) -> Cell:
    return lambda row: show_in(f"{{{figure}[{row.at[3]}]:{form}}}", row.above(2))


def _at_moderate_load(cell: str) -> Cell:
    """Show a figure of the policy's point with the highest rate of at most half of its peak."""

    def moderate(row: Place) -> str:
        wanted = *(row.above(2).get(field) for field in ("application", "how")), row.at[3]
        own = [
            point
            for point in row.above(0).each("points.*")
            if tuple(point.get(field) for field in ("application", "how", "policy")) == wanted
        ]
        peak = max(point.get("requests_per_s") for point in own)
        rates = {
            point.get("rate"): point for point in own if (point.get("rate") or peak) <= peak / 2
        }
        return show_in(cell, rates[max(rates)]) if rates else ""

    return moderate


_POLICIES = (
    ("workload", "{above2[application]}"),
    ("", "{above2[how]}"),
    ("policy", key()),
    ("most requests/s", _of_policy("peaks_per_s", "@.1f")),
    ("ours over it", _of_policy("peak_over", ".2f?")),
    ("with p90 within 0.5 s", _of_policy("peaks_within_per_s", ".1f")),
    ("ours over it", _of_policy("within_over", ".2f?")),
    ("p90 at moderate load is lower by", _of_policy("p90_lower_by", ".0%?")),
    ("queueing", _at_moderate_load("{queueing_s[p90]:.2f ms}")),
    ("computing", _at_moderate_load("{computing_s[p90]:.2f ms}")),
    ("batch", _at_moderate_load("{average_batch:.1f}")),
)


def _if_it_ran(cell: str) -> Cell:
    return lambda row: show_in(cell, row) if row.get("runs") else ""


def _error(row: Place) -> str:
    return "" if row.get("runs") else (row.get("error") or "").partition("\n")[0]


_SYSTEMS = (
    ("workload", "{application}"),
    ("load", "{load}"),
    ("system", "{engine:words}"),
    ("requests/s", _if_it_ran("{requests_per_s:@~.1f}")),
    ("p50", _if_it_ran("{latency_s[p50]:~.1f ms}")),
    ("p90", _if_it_ran("{latency_s[p90]:~.1f ms}")),
    ("agree", _if_it_ran("{agreeing:.0%?}")),
    ("", _error),
)


def _behind(whole: Place) -> Iterator[str]:
    """Yield a sentence for each workload and load in which another system is ahead of ours."""
    ran = [each.get() for each in whole.each("compare.*") if each.get("runs")]
    for ours in (entry for entry in ran if entry["engine"] == _OURS):
        where = ours["application"], ours["load"]
        others = [entry for entry in ran if (entry["application"], entry["load"]) == where]
        most = max(others, key=lambda entry: entry["requests_per_s"])
        soonest = min(others, key=lambda entry: entry["latency_s"]["p90"])
        lost = []
        if most is not ours:
            times = most["requests_per_s"] / ours["requests_per_s"]
            lost.append(f"{name(most['engine'])} serves {times:.2f} times as many requests/s")
        if soonest is not ours:
            share = soonest["latency_s"]["p90"] / ours["latency_s"]["p90"]
            lost.append(f"{name(soonest['engine'])} has {share:.2f} times its p90")
        if lost:
            yield f"jaxserve is behind on {where[0]}, {where[1]}: {', and '.join(lost)}."
