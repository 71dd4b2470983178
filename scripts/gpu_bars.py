"""The table of a gpu-check's results next to their bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, final

from rich.console import Console
from rich.table import Table

from benchmarks.common.shapes import SHAPES
from benchmarks.decode.step_time import H100, counted, predict

Verdict = Literal[
    "met",
    "not met",
    "as predicted",
    "better than predicted",
    "worse than predicted",
    "not measured",
    "no bar",
]

# docs/benchmarks/gpu.md, "The bars", explains these bars.
MAX_ERROR = 1e-2
MIN_OF_COPY = 0.75
MIN_TRITON_FLOPS, MIN_MOSAIC_FLOPS = 400e12, 550e12
MIN_OF_BOUND = 0.8
MIN_OF_PARTS = 0.9
MAX_IDLE = 0.02
# Ratio of a measurement to its prediction up to which both count as equal.
_AS_PREDICTED = 1.1
# Products with weights in few bits: steps of up to this many tokens are bound by memory.
MIN_OF_PRODUCT_BOUND = 0.7
_MAX_DECODE_TOKENS = 64
# Maximum number of characters of a reason in the table; the file has the whole reason.
_MAX_TEXT = 120
# Minimum batch and context to which the bars of decoding and prefill apply.
_MIN_BATCH, _MIN_CONTEXT = 32, 4096

MODELS = {"llama_3_8b": "Llama 3 8B", "llama_2_13b": "Llama 2 13B"}
CHOICES = ("choices", "choices_host", "choices_none")

# Parts that are tests, with the words of the table.
_TESTS = MappingProxyType(
    {
        "tests": "kernels against XLA in float32",
        "families": "models against transformers",
        "invariant_tests": "the same bits in any batch",
        "mosaic_tests": "Mosaic's kernels against XLA in float32",
        "tests_rest": "all other cases of the kernels",
        "families_rest": "all other families",
    }
)

Parts = Mapping[str, Mapping[str, Any]]
Row = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Bar:
    """One line of the table: the measurement, the bar, the result, and the verdict."""

    what: str
    wanted: str
    found: str
    verdict: Verdict


def bars(parts: Parts) -> list[dict[str, str]]:
    """Return every bar, with the results of the parts measured so far."""
    shapes = [*_rows(parts, "kernels", "shapes"), *_rows(parts, "kernels_rest", "shapes")]
    lines = [
        *_tests(parts),
        _most("attention, relative error in bf16", shapes, "error", MAX_ERROR, "{:.1e}"),
        _least(
            f"decode, batch >= {_MIN_BATCH}, context >= {_MIN_CONTEXT}: share of copy bandwidth",
            [row for row in shapes if _is_long_decode(row)],
            "of_copy",
            MIN_OF_COPY,
            "{:.0%}",
        ),
        _prefill("prefill, 4096 and more, Triton", shapes, MIN_TRITON_FLOPS),
        _prefill(
            "prefill, 4096 and more, Mosaic", _rows(parts, "mosaic", "shapes"), MIN_MOSAIC_FLOPS
        ),
        *_mixed(shapes, "Triton"),
        *_mixed(_rows(parts, "mosaic", "shapes"), "Mosaic"),
        *_products(_rows(parts, "products", "products")),
        *_groups(_rows(parts, "groups", "groups")),
        *_kernel_peers(parts, shapes),
        *(line for model in MODELS for line in _model(parts, model)),
        *_predicted(parts),
        *_launches(parts),
        *_memory(parts),
        *_start(parts),
        *_choices(parts),
        *_restore(parts),
    ]
    return [asdict(line) for line in lines]


def print_table(lines: Iterable[Mapping[str, str]]) -> None:
    table = Table("", "wanted", "found", "", title="gpu-check", box=None)
    styles = {"met": "green", "not met": "red", "not measured": "yellow", "no bar": "dim"}
    styles |= {"as predicted": "green", "better than predicted": "green"}
    styles |= {"worse than predicted": "red"}
    for line in lines:
        verdict = line["verdict"]
        table.add_row(line["what"], line["wanted"], line["found"], verdict, style=styles[verdict])
    console = Console(stderr=True)
    console.width = max(console.width, 120)  # also without a terminal
    console.print(table)


def _rows(parts: Parts, name: str, kind: str) -> list[Row]:
    result = parts.get(name, {}).get("result") or {}
    return result.get(kind, [])


def _why_missing(parts: Parts, name: str) -> str:
    part = parts.get(name)
    if part is None:
        return "not run"
    failed = (part.get("result") or {}).get("failed") or {}
    return _short(next(iter(failed.values()), None) or part.get("reason") or part["status"])


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."


def _least(what: str, rows: Sequence[Row], field: str, bar: float, form: str) -> Bar:
    wanted = f">= {form.format(bar)}"
    if not rows:
        return Bar(what, wanted, "", "not measured")
    worst = min(rows, key=lambda row: row[field])
    met = worst[field] >= bar
    found = f"{form.format(worst[field])} at worst, {worst['shape']}"
    return Bar(what, wanted, found, "met" if met else "not met")


def _most(what: str, rows: Sequence[Row], field: str, bar: float, form: str) -> Bar:
    wanted = f"<= {form.format(bar)}"
    if not rows:
        return Bar(what, wanted, "", "not measured")
    met = all(row[field] <= bar for row in rows)
    worst = max(rows, key=lambda row: (row[field] != row[field], row[field]))
    found = f"{form.format(worst[field])} at worst of {len(rows)}, {worst['shape']}"
    return Bar(what, wanted, found, "met" if met else "not met")


def _tests(parts: Parts) -> Iterable[Bar]:
    for name in _TESTS:
        part = parts.get(name, {})
        counted = part.get("result")
        if not counted or not (counted["passed"] or counted["failed"]):
            yield Bar(_TESTS[name], "all pass", _why_missing(parts, name), "not measured")
            continue
        found = f"{counted['passed']} passed, {len(counted['failed'])} failed"
        if part["status"] != "done" and not counted["failed"]:
            yield Bar(_TESTS[name], "all pass", f"{found}, then {part['status']}", "not measured")
        else:
            met = part["status"] == "done"
            yield Bar(_TESTS[name], "all pass", found, "met" if met else "not met")


def _is_long_decode(row: Row) -> bool:
    return (
        row["longest_query"] == 1
        and row["rows"] >= _MIN_BATCH
        and row["shortest_context"] >= _MIN_CONTEXT
    )


def _prefill(what: str, rows: Sequence[Row], bar: float) -> Bar:
    prompts = [
        {"shape": row["shape"], "tera": row["flops_per_s"] / 1e12}
        for row in rows
        if row["rows"] == 1 and row["longest_query"] == row["shortest_context"] >= _MIN_CONTEXT
    ]
    return _least(what, prompts, "tera", bar / 1e12, "{:.0f} TFLOP/s")


def _mixed(rows: Sequence[Row], kernel: str) -> Iterable[Bar]:
    for row in rows:
        if "of_parts_bound" in row:
            met = row["of_parts_bound"] >= MIN_OF_PARTS
            found = f"{row['of_parts_bound']:.0%} of the sum of its parts' rooflines"
            yield Bar(
                f"{row['shape']}, {kernel}",
                f">= {MIN_OF_PARTS:.0%}",
                found,
                "met" if met else "not met",
            )


def _products(rows: Sequence[Row]) -> Iterable[Bar]:
    """Yield the bars of products with weights in few bits: their error, bound, and dense ones."""
    what = "products in few bits"
    yield _most(f"{what}, relative error", rows, "error", MAX_ERROR, "{:.1e}")
    few = [row for row in rows if row["tokens"] <= _MAX_DECODE_TOKENS]
    yield _least(
        f"{what}, up to {_MAX_DECODE_TOKENS} tokens: share of the roofline",
        few,
        "of_bound",
        MIN_OF_PRODUCT_BOUND,
        "{:.0%}",
    )
    ratios = [{**row, "ratio": row["dense_s"] / row["seconds"]} for row in few]
    yield _least(f"{what}: speed over the dense product", ratios, "ratio", 1.0, "{:.2f} times")


def _groups(rows: Sequence[Row]) -> Iterable[Bar]:
    """Yield the bars of products of groups of tokens: their error, XLA's product, and a loop."""
    what = "products of groups"
    yield _most(f"{what}, relative error", rows, "error", MAX_ERROR, "{:.1e}")
    for other, field in (("XLA's", "xla_s"), ("a loop over the matrices", "loop_s")):
        ratios = [{**row, "ratio": row[field] / row["seconds"]} for row in rows]
        yield _least(f"{what}: speed over {other}", ratios, "ratio", 1.0, "{:.2f} times")


def _kernel_peers(parts: Parts, shapes: list[Row]) -> Iterable[Bar]:
    """Yield the bars of our kernels against each peer, over the shapes that both were timed at."""
    theirs: dict[str, dict[str, Row]] = {}
    others = [
        row
        for name in ("kernel_peers", "kernel_peers_rest")
        for row in _rows(parts, name, "shapes")
    ]
    for row in (*shapes, *others):
        for peer, figures in row.get("peers", {}).items():
            theirs.setdefault(peer, {})[row["shape"]] = figures
    own = {row["shape"]: row["seconds"] for row in shapes}
    if not theirs:
        yield Bar("ahead of other kernels", "everywhere", "", "not measured")
    for peer, found in theirs.items():
        ratios = {
            shape: figures["seconds"] / own[shape]
            for shape, figures in found.items()
            if "seconds" in figures and shape in own
        }
        what = f"faster than {peer}"
        if not ratios:
            reasons = [figures["reason"] for figures in found.values() if "reason" in figures]
            why = _short((reasons or ["no shape of ours"])[0])
            yield Bar(what, "at every shape", why, "not measured")
            continue
        worst = min(ratios, key=lambda shape: ratios[shape])
        ahead = sum(ratio >= 1 for ratio in ratios.values())
        text = f"{ahead} of {len(ratios)} shapes; {ratios[worst]:.2f} times at worst, {worst}"
        yield Bar(what, "at every shape", text, "met" if ahead == len(ratios) else "not met")


def _model(parts: Parts, model: str) -> Iterable[Bar]:
    name, own = MODELS[model], f"decode_{model}"
    batches = _rows(parts, own, "batches")
    timed = sorted((row for row in batches if "of_bound" in row), key=lambda row: row["batch_size"])
    what, wanted = f"{name}, decode: share of the memory roofline", f">= {MIN_OF_BOUND:.0%}"
    if not timed:
        yield Bar(what, wanted, _why_missing(parts, own), "not measured")
    else:
        found = ", ".join(f"{row['batch_size']}: {row['of_bound']:.0%}" for row in timed)
        left_out = [str(row["batch_size"]) for row in batches if "does_not_fit" in row]
        found += f"; no memory for {', '.join(left_out)}" if left_out else ""
        met = all(row["of_bound"] >= MIN_OF_BOUND for row in timed)
        yield Bar(what, wanted, found, "met" if met else "not met")
    yield _idle(parts, own, name, timed)
    for row in _rows(parts, own, "prefill"):
        found = f"{row['tokens_per_s']:,.0f} tokens/s, {row['of_bound']:.0%} of the products' bound"
        what = f"{name}, prefill of {row['prompts']} x {row['prompt_tokens']}"
        yield Bar(what, "", found, "no bar")
    theirs = {row["batch_size"]: row for row in _rows(parts, f"hf_{model}", "batches")}
    ratios = {
        row["batch_size"]: row["output_tokens_per_s"]
        / theirs[row["batch_size"]]["output_tokens_per_s"]
        for row in timed
        if row["batch_size"] in theirs
    }
    what = f"{name}: tokens/s over transformers' continuous batching"
    if not ratios:
        yield Bar(what, "> 1", _why_missing(parts, f"hf_{model}"), "not measured")
    else:
        found = ", ".join(f"{size}: {ratio:.2f} times" for size, ratio in ratios.items())
        met = min(ratios.values()) > 1
        yield Bar(what, "> 1", found, "met" if met else "not met")


def _predicted(parts: Parts) -> Iterable[Bar]:
    """Yield the predicted milliseconds of Llama 3 8B's decode steps next to the measured ones.

    The rates of memory and arithmetic are those that the part measured first.
    """
    for kv_dtype in (None, "float8_e4m3fn"):
        name = "decode_llama_3_8b" + (f"_{kv_dtype}" if kv_dtype else "")
        result = parts.get(name, {}).get("result") or {}
        for row in result.get("batches", []):
            if "decode_step_s" not in row:
                continue
            own = predict(
                "llama-3-8b",
                replace(
                    H100,
                    bytes_per_s=result["machine"]["copy_bytes_per_s"],
                    flops_per_s=result["machine"]["product_flops_per_s"],
                ),
                counted(row["batch_size"], kv_dtype),
                batch=row["batch_size"],
                context=result["prompt_tokens"] + result["output_tokens"] / 2,
                kv_dtype=kv_dtype,
            )
            what = f"Llama 3 8B, ms a step, batch {row['batch_size']}, {kv_dtype or 'bf16'} pages"
            yield _compared(what, row["decode_step_s"] * 1e3, own.total_s * 1e3, "{:.2f}")
        for row in result.get("prefill", []):
            what = f"Llama 3 8B, ms of a prefill of {row['prompts']} x {row['prompt_tokens']}"
            yield _compared(what, row["wall_s"] * 1e3, row["bound_s"] * 1e3, "{:.0f}")


def _compared(what: str, found: float, predicted: float, form: str) -> Bar:
    """Return the line of a prediction, of which less is better."""
    ratio = found / predicted
    verdict: Verdict = "as predicted"
    if not 1 / _AS_PREDICTED <= ratio <= _AS_PREDICTED:
        verdict = "better than predicted" if ratio < 1 else "worse than predicted"
    text = f"{form.format(found)}, {ratio:.2f} times"
    return Bar(what, f"{form.format(predicted)} predicted", text, verdict)


def _launches(parts: Parts) -> Iterable[Bar]:
    """Yield the launches of an iteration next to those that `make kernel-gate` counted."""
    for row in _rows(parts, "decode_llama_3_8b", "traces"):
        own = counted(row["batch_size"])
        predicted = SHAPES["llama-3-8b"][2] * own.a_layer + own.beside
        if (found := row.get("launches_an_iteration")) is not None:
            what = f"Llama 3 8B, launches an iteration, batch {row['batch_size']}"
            yield _compared(what, found, predicted, "{:.0f}")


def _memory(parts: Parts) -> Iterable[Bar]:
    """Yield the most memory that was in use next to what the runtime planned."""
    what, own = "Llama 3 8B, GB of the device in use at most", "decode_llama_3_8b"
    found = (parts.get(own, {}).get("result") or {}).get("memory")
    if not found:
        yield Bar(what, "as planned", _why_missing(parts, own), "not measured")
    else:
        yield _compared(what, found["peak_bytes"] / 1e9, found["planned_bytes"] / 1e9, "{:.1f}")


def _start(parts: Parts) -> Iterable[Bar]:
    """Yield the seconds to the first token, and that a second start compiles nothing."""
    result = parts.get("start", {}).get("result") or {}
    what = "Llama 3 8B, executables that a second start compiles"
    if "warm" not in result:
        yield Bar(what, "0", _why_missing(parts, "start"), "not measured")
        return
    seconds = ", ".join(
        f"{kind} {result[kind]['first_token_s']:.1f}" for kind in ("cold", "warm") if kind in result
    )
    compiled = result["warm"]["num_compiled"]
    found = f"{compiled:.0f}, {result['warm']['num_loaded']:.0f} loaded; s to a token: {seconds}"
    yield Bar(what, "0", found, "not met" if compiled else "met")


def _idle(parts: Parts, own: str, name: str, timed: list[Row]) -> Bar:
    """Return the bar of the idle time: from a trace if there is one, else the host's bound."""
    what, wanted = f"{name}: device idle", f"< {MAX_IDLE:.0%}"
    traces = _rows(parts, own, "traces")
    if traces:
        worst = max(row["idle_share"] for row in traces)
        long = max(row["long_gap_share"] for row in traces)
        found = f"{worst:.1%}, {long:.1%} in gaps of 20 us and more"
        # The bar is for gaps between steps; gaps within a step count against the roofline.
        return Bar(what, wanted, found, "met" if long < MAX_IDLE else "not met")
    if timed:
        worst = max(row["host_gap_share"] for row in timed)
        found = f"{worst:.1%} at most, by the host"
        return Bar(what, wanted, found, "met" if worst < MAX_IDLE else "not met")
    return Bar(what, wanted, "", "not measured")


def _choices(parts: Parts) -> Iterable[Bar]:
    found: dict[int, list[str]] = {}
    for name in CHOICES:
        for row in _rows(parts, name, "choices"):
            if "decode_step_s" in row:
                text = f"{row['layout']} {name.removeprefix('choices').strip('_') or 'default'}"
                found.setdefault(row["batch_size"], []).append(
                    f"{text} {row['decode_step_s'] * 1e3:.2f}"
                )
    if not found:
        yield Bar("layers scanned or unrolled, command buffers", "", "", "not measured")
    for size, texts in found.items():
        yield Bar(f"ms a step, batch {size}", "", ", ".join(texts), "no bar")


def _restore(parts: Parts) -> Iterable[Bar]:
    """Yield the milliseconds to a turn's first token with host pages, and other requests' loss."""
    found: dict[str, list[str]] = {}
    for point in _rows(parts, "restore", "points"):
        situation = point["situation"].replace("_", " ")
        what = f"ms to the first token (others lose), {point['length']} from the host, {situation}"
        first, lost = (f"{point[name] * 1e3:.0f}" for name in ("first_token_s", "others_lost_s"))
        found.setdefault(what, []).append(f"{point['way']} {first} ({lost})")
    if not found:
        why = _why_missing(parts, "restore")
        yield Bar("pages that come back from the host", "", why, "not measured")
    for what, texts in found.items():
        yield Bar(what, "", ", ".join(texts), "no bar")
