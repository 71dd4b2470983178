"""What all tables of results are made of."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.results import Result


def caption(result: Result, what: str, link: str) -> str:
    return f"{what}, on {where(result)} ([{result.path.stem}]({link}))."


def linked(value: float, form: str, link: str) -> str:
    return f"[{value:{form}}]({link})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines
    )


def where(result: Result) -> str:
    """The machine, in words."""
    device = result.get("device")
    if result.get("device", "platform") != "cpu":
        return f"{device['count']} x {device['kind']}"
    return f"{device['host_cores']} cores of {device['host_cpu']}"
