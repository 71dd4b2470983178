"""What was lost, in a sentence: where policies by predicted length are behind their baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.common.policies import BASELINES, PREDICTING, missing_baselines
from benchmarks.common.repeats import Spread
from benchmarks.figures.style import name

# A difference below this share is not one.
_LEAST = 0.0005


def losses(
    unit: str, sets: Mapping[str, Mapping[str, Spread]], *, is_lower_better: bool = False
) -> str:
    """Return where `s3` and `auto` are behind `vllm_like` and `s3_oracle`; "" without the former.

    Args:
      unit: of the figures, in words.
      sets: figures by policy, by where they were measured ("" for one place alone).
      is_lower_better: whether less is better, as for latencies.
    """
    policies = dict.fromkeys(policy for found in sets.values() for policy in found)
    ours = [policy for policy in PREDICTING if policy in policies]
    if not ours:
        return ""
    known = [baseline for baseline in BASELINES if baseline in policies]
    behind = {place: list(_behind(found, is_lower_better)) for place, found in sets.items()}
    parts = [
        f"{place}{', '.join(texts)}"
        for place, texts in ((f"{p}: " if p else "", texts) for p, texts in behind.items())
        if texts
    ]
    sentences = []
    if parts:
        comma = ", " if "" not in sets else ": "
        sentences.append(f"Lost in {unit}{comma}{'; '.join(parts)}.")
    elif known:
        verb = "is" if len(ours) == 1 else "are"
        names, others = " and ".join(map(name, ours)), " and ".join(map(name, known))
        sentences.append(f"Nothing lost in {unit}: {names} {verb} not behind {others}.")
    if missing := missing_baselines(policies):
        verb = "was" if len(missing) == 1 else "were"
        sentences.append(f"{' and '.join(map(name, missing))} {verb} not measured here.")
    return " ".join(sentences)


def behind_by(own: Spread, other: Spread, *, is_lower_better: bool = False) -> float | None:
    """Return by which share of the other's median ours is worse; None if it is not."""
    share = own.median / other.median - 1 if is_lower_better else 1 - own.median / other.median
    return share if share > _LEAST else None


def _behind(found: Mapping[str, Spread], is_lower_better: bool) -> Iterator[str]:
    """Yield, for each policy that is behind a baseline, the baselines and the shares."""
    for policy in PREDICTING:
        texts = []
        for baseline in BASELINES:
            if policy not in found or baseline not in found:
                continue
            own, other = found[policy], found[baseline]
            share = behind_by(own, other, is_lower_better=is_lower_better)
            if share is not None:
                form = ".0%" if share >= 0.01 else ".1%"
                touches = own.num_runs > 1 and own.overlaps(other)
                note = " (their ranges overlap)" if touches else ""
                texts.append(f"{share:{form}} behind {name(baseline)}{note}")
        if texts:
            yield f"{name(policy)} is {' and '.join(texts)}"
