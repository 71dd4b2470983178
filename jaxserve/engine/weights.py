"""Parameters on their way to an executor: onto a mesh, or in place of others."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.config import check_fits
from sharding import placed, state_shardings


def sharded(params: Any, mesh: Mesh, model_config: Any) -> Any:
    """`params` on `mesh`, by the rules of `sharding`; arrays that are there so are not copied.

    Raises:
      InvalidConfigError: the mesh does not divide them.
    """
    check_fits(mesh, model_config)
    return placed(params, state_shardings(params, mesh))


def check_same(params: Any, expected: Any) -> None:
    """Raise InvalidConfigError unless structure, shapes and dtypes of two states are the same.

    Names the first difference. Either may be abstract.
    """
    new, now = (
        {path: v.get_value() for path, v in nnx.to_flat_state(tree)} for tree in (params, expected)
    )
    problems = [f"{'.'.join(map(str, path))} is missing" for path in now if path not in new]
    problems += [f"{'.'.join(map(str, path))} is unknown" for path in new if path not in now]
    problems += [
        f"{'.'.join(map(str, path))} is {new[path].dtype}{new[path].shape} in place of "
        f"{array.dtype}{array.shape}"
        for path, array in now.items()
        if path in new and (new[path].shape, new[path].dtype) != (array.shape, array.dtype)
    ]
    if problems:
        raise InvalidConfigError(
            f"the parameters are not this model's: {problems[0]}"
            + (f", and {len(problems) - 1} more such" if problems[1:] else "")
            + "; give a state of the same structure, shapes and dtypes"
        )


def fitted(params: Any, old: Any) -> Any:
    """`params` where `old` are; arrays that are there already are not copied.

    Raises:
      InvalidConfigError: as `check_same`.
    """
    check_same(params, old)
    new = dict(nnx.to_flat_state(params))
    return nnx.from_flat_state(
        [
            (path, old.replace(placed(new[path].get_value(), old.get_value().sharding)))
            for path, old in nnx.to_flat_state(old)
        ]
    )
