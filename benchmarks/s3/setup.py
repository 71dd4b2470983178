"""What the S3 paper evaluates: models, GPUs, and the numbers of its tables 2 to 4."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.planning import DeviceRoofs, ModelShape, RooflineCost

# Tokens of the longest sequence, which ORCA reserves for each.
MAX_CONTEXT = 2048
PAGE_TOKENS = 16
# NVIDIA A100 80 GB (SXM): data sheet; PCIe 4.0 x8 as in section 4.
A100 = DeviceRoofs(
    flops=312e12, memory_bytes_per_s=2.039e12, link_bytes_per_s=15.75e9, memory_bytes=80e9
)
# Table 1, as printed.
MODELS = {
    "GPT-J": ModelShape(num_params=6e9, num_layers=28, hidden_size=5120),
    "LLAMA 13B": ModelShape(num_params=13e9, num_layers=40, hidden_size=4096),
    "GPT-NEOX": ModelShape(num_params=20e9, num_layers=44, hidden_size=6144),
    "LLAMA 33B": ModelShape(num_params=30e9, num_layers=60, hidden_size=6656),
}
GPT3 = ModelShape(num_params=175e9, num_layers=96, hidden_size=12288)
NUM_GPUS = (6, 8, 10)
# The policies of tables 2, 3 and 4, and their tokens a second, average batch and iterations.
PAPER_POLICIES = ("orca", "s3", "s3_oracle")
PAPER = {
    "GPT-J": {
        "output_tokens_per_s": (2061.16, 2349.67, 2569.09),
        "average_batch": (69.94, 530.0, 564.88),
        "num_iterations": (7988, 1054, 989),
    },
    "LLAMA 13B": {
        "output_tokens_per_s": (1018.15, 1641.55, 1907.09),
        "average_batch": (31.61, 274.66, 527.04),
        "num_iterations": (17675, 2034, 1060),
    },
    "GPT-NEOX": {
        "output_tokens_per_s": (490.15, 1344.94, 1530.05),
        "average_batch": (16.89, 157.59, 292.19),
        "num_iterations": (33069, 3545, 1912),
    },
    "LLAMA 33B": {
        "output_tokens_per_s": (91.46, 593.73, 834.30),
        "average_batch": (4.0, 42.47, 77.35),
        "num_iterations": (139790, 13155, 7223),
    },
    "GPT3, 6 GPUs": {
        "average_batch": (11.95, 114.22, 209.47),
        "num_iterations": (46734, 4891, 2667),
    },
    "GPT3, 8 GPUs": {
        "average_batch": (28.68, 247.85, 470.65),
        "num_iterations": (19482, 2254, 1187),
    },
    "GPT3, 10 GPUs": {
        "average_batch": (48.99, 399.62, 564.88),
        "num_iterations": (11403, 1398, 989),
    },
}


def machines() -> Iterator[tuple[str, RooflineCost]]:
    """Yield name and step costs of every model on its GPUs."""
    for name, model in MODELS.items():
        yield name, RooflineCost(model=model, roofs=A100, page_tokens=PAGE_TOKENS)
    for count in NUM_GPUS:
        yield (
            f"GPT3, {count} GPUs",
            RooflineCost(model=GPT3, roofs=A100, page_tokens=PAGE_TOKENS, num_stages=count),
        )


def paper_value(model: str, key: str, policy: str) -> float | None:
    """Return the paper's own number; None where it has none."""
    values = PAPER.get(model, {}).get(key)
    if values is None or policy not in PAPER_POLICIES:
        return None
    return values[PAPER_POLICIES.index(policy)]
