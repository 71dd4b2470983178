"""Numbers that llguidance does not hold, and regular expressions of decimals within bounds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def is_held(value: Any) -> bool:
    """Whether llguidance reads a constant or a bound as the number that it is.

    A double holds integers up to 2^53. Its parser makes other numbers of a whole one and a power of
    ten, and is exact where a double holds both.
    """
    if isinstance(value, Mapping):
        return all(map(is_held, value.values()))
    if isinstance(value, list):
        return all(map(is_held, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a number that a double does not hold, {value!r}, cannot be written")
    _, digits, power = Decimal(repr(value)).normalize().as_tuple()
    whole = int("".join(map(str, digits)))
    return whole <= 2**53 and abs(value) <= 2**53 and isinstance(power, int) and power >= -22


def decimals_within(schema: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return a terminal of the decimals within the bounds of a schema."""
    if "multipleOf" in schema:
        raise ValueError(
            '"multipleOf" is not supported beside a bound that a double does not hold; leave one '
            "of them out"
        )
    bounds = {key: schema[key] for key in BOUNDS if key in schema}
    parts = []
    for key, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f'"{key}": {json.dumps(value)} is not a number')
        bound, is_strict = Decimal(repr(value)), key.startswith("exclusive")
        # A bound from above is one from below of the negative number.
        is_above = key.lower().endswith("maximum")
        parts.append(_beyond(-bound if is_above else bound, is_strict, is_above))
    if is_whole:
        parts.append("-?(?:0|[1-9][0-9]*)")
    elif any(abs(value) > 2**53 for value in bounds.values()):
        # The double that is read of a larger one with a fraction could be beyond the bound.
        parts.append(r"-?(?:0|[1-9][0-9]*|(?:0|[1-9][0-9]{0,14})\.[0-9]+)")
    return " & ".join(f"/{part}/" for part in parts)


def _beyond(bound: Decimal, is_strict: bool, is_mirrored: bool) -> str:
    """Return a regex of decimals from a bound on; with `is_mirrored`, of their negatives."""
    own, other = ("-", "") if is_mirrored else ("", "-")
    if bound > 0 or (bound == 0 and is_strict):
        return own + _larger(bound, is_strict)
    return f"{own}{_larger(Decimal(0), False)}|{other}{_smaller(-bound, is_strict)}"


def _split(bound: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{bound:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _larger(bound: Decimal, is_strict: bool) -> str:
    """Return a regex of decimals without a sign from a bound on, which is not negative."""
    whole, fraction = _split(bound)
    same = [f"{fraction[:i]}[{int(c) + 1}-9][0-9]*" for i, c in enumerate(fraction) if c != "9"]
    same.append(f"{fraction}[0-9]*[1-9][0-9]*" if is_strict else f"{fraction}[0-9]*")
    same_whole = rf"{whole}\.(?:{'|'.join(same)})"
    bare = [] if fraction or is_strict else [str(whole)]
    return _any([*bare, same_whole, rf"{_from(whole + 1)}(?:\.[0-9]+)?"])


def _smaller(bound: Decimal, is_strict: bool) -> str:
    """Return a regex of decimals without a sign up to a bound, which is not negative."""
    whole, fraction = _split(bound)
    found = [rf"{_up_to(whole - 1)}(?:\.[0-9]+)?"] if whole else []
    if fraction or not is_strict:
        found.append(str(whole))
    same = [f"{fraction[:i]}[0-{int(c) - 1}][0-9]*" for i, c in enumerate(fraction) if c != "0"]
    same += [fraction[:i] for i in range(1, len(fraction))]
    if not is_strict:
        same.append(f"{fraction}0*" if fraction else "0+")
    if same:
        found.append(rf"{whole}\.(?:{'|'.join(same)})")
    return _any(found) if found else "[^0-9]"


def _from(least: int) -> str:
    """Return a regex of whole numbers from one on, which is positive."""
    digits = str(least)
    found = [digits]
    for i, c in enumerate(digits):
        if c != "9":
            found.append(f"{digits[:i]}[{int(c) + 1}-9]" + _count(len(digits) - i - 1))
    return _any([*found, f"[1-9][0-9]{{{len(digits)},}}"])


def _up_to(most: int) -> str:
    """Return a regex of whole numbers up to one, from 0 on."""
    digits = str(most)
    found = [digits]
    for i, c in enumerate(digits):
        first = "1" if i == 0 and len(digits) > 1 else "0"
        if c > first:
            found.append(f"{digits[:i]}[{first}-{int(c) - 1}]" + _count(len(digits) - i - 1))
    shorter = len(digits) - 1
    return _any([*found, *(["0", f"[1-9][0-9]{{0,{shorter - 1}}}"] if shorter else [])])


def _count(num_digits: int) -> str:
    return f"[0-9]{{{num_digits}}}" if num_digits else ""


def _any(parts: list[str]) -> str:
    return f"(?:{'|'.join(parts)})"
