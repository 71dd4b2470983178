"""What differs between the versions of JAX that the project runs with, 0.10 to 0.12.

Python 3.11 has JAX 0.10, as newer ones need Python 3.12. No other module asks for a version, or for
a name that some version lacks.
"""

from __future__ import annotations

from typing import Any

import jax

# The Mosaic kernels need its interpreter, and the signatures of its loads.
MIN_JAX_OF_MOSAIC = (0, 11)


def has_mosaic() -> bool:
    """Return whether this JAX has what the Mosaic kernels need."""
    return jax.__version_info__ >= MIN_JAX_OF_MOSAIC


def check_mosaic() -> None:
    """Raise NotImplementedError if this JAX is too old for the Mosaic kernels."""
    if not has_mosaic():
        needed = ".".join(map(str, MIN_JAX_OF_MOSAIC))
        raise NotImplementedError(f"it needs JAX {needed} or newer, not {jax.__version__}")


def mosaic_interpreter() -> Any:
    """Return the parameters with which Mosaic kernels are interpreted, and races are found."""
    from jax.experimental.pallas import mosaic_gpu  # slow, and used by these kernels alone

    return mosaic_gpu.InterpretGPUParams(detect_races=True)  # pyrefly: ignore[missing-attribute]


def kept_arguments(lowered: jax.stages.Lowered) -> list[int] | None:
    """Return the indices of the flat arguments that a lowered program uses.

    JAX has them in no public attribute. None if this version of JAX lacks the private one; the
    program is then not stored.
    """
    details = getattr(getattr(lowered, "_lowering", None), "compile_args", {})
    kept = details.get("kept_var_idx")
    return None if kept is None else sorted(kept)
