"""The table of engines that answered the same requests in turns."""

from __future__ import annotations

from benchmarks.figures.markdown import shown, table
from benchmarks.figures.results import Keys, Result
from benchmarks.figures.style import name


def engines(result: Result, at: Keys, link: str) -> str:
    """Return every engine of the comparison `at`, and a sentence of where ours is behind."""
    rows, behind = [], []
    fewer = list(result.get(*at).get("fewer") or ())
    for engine, figures in result.items(*at, "engines"):
        if figures.get("error"):
            rows.append([name(engine), f"[failed]({link})", " ".join(figures["error"].split()), ""])
            rows[-1] += [""] * len(fewer)
            continue
        own = (*at, "engines", engine)
        faster_by = result.spread(own, "jaxserve_is_faster_by")
        rows.append(
            [
                name(engine),
                shown(result.spread(own, "output_tokens_per_s"), ".0f", link=link),
                shown(faster_by, ".2f"),
                shown(result.spread(own, "startup_s"), ".1f", " s"),
            ]
        )
        if faster_by.median < 1:
            behind.append(f"{name(engine)}: {shown(faster_by, '.2f')} times its speed")
        for number in fewer:
            of_fewer = (*at, "fewer", number, engine)
            ratio = result.spread(of_fewer, "jaxserve_is_faster_by")
            rate = shown(result.spread(of_fewer, "output_tokens_per_s"), ".0f")
            rows[-1].append(f"{rate}, {shown(ratio, '.2f')} times")
            if ratio.median < 1:
                behind.append(
                    f"{name(engine)} at {number} of them: {shown(ratio, '.2f')} times its speed"
                )
    header = ["engine", "output tokens/s", "jaxserve is faster by", "start-up"]
    header += [f"{number} of them: tokens/s, faster by" for number in fewer]
    lost = f"jaxserve is behind {' and '.join(behind)}." if behind else "No engine is faster."
    return f"{table(header, rows)}\n\n{lost}"
