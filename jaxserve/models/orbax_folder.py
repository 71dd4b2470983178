"""Reads parameters of a `Decoder` that Orbax has written, straight onto their shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxserve.core.errors import CheckpointError

# A file of every tree that Orbax has written whole.
_MARK = "_METADATA"
# Items of a step of a `CheckpointManager` that may be the parameters.
_ITEMS = ("params", "default")


def checkpoint_in(folder: Path) -> Path | None:
    """Return the checkpoint of the parameters in a folder; None if there is none.

    It is the folder itself, its `params`, or the newest step of a `CheckpointManager`, there or in
    the folder itself: the step's item `params`, or its only item.
    """
    for root in (folder, folder / "params"):
        if (root / _MARK).is_file():
            return root
        steps = [at for at in root.glob("[0-9]*") if at.name.isdecimal()]
        for step in sorted(steps, key=lambda at: int(at.name), reverse=True):
            found = next((step / item for item in _ITEMS if (step / item / _MARK).is_file()), None)
            if found is not None:
                return found
    return None


def restore(path: Path, abstract_state: nnx.State, shardings: nnx.State | None) -> nnx.State:
    """Return the parameters of the abstract state, in its dtypes.

    The checkpoint has them under their paths in the model, as `nnx.state(model, nnx.Param)` or as
    plain arrays.

    Args:
      shardings: from `sharding.state_shardings`; None for the default device.

    Raises:
      CheckpointError: every missing, surplus and misshapen parameter together, before data is read;
        or data that cannot be read.
    """
    import orbax.checkpoint as ocp  # takes a second, and few starts need it

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = {} if shardings is None else dict(nnx.to_flat_state(shardings))
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            found = _flat(checkpointer.metadata(path).item_metadata.tree)
        except Exception as error:  # Orbax has no type for a damaged folder
            raise _damaged(path, error) from error
        wanted = {
            tuple(map(str, at)): jax.ShapeDtypeStruct(
                variable.get_value().shape,
                variable.get_value().dtype,
                sharding=places[at].get_value() if places else here,
            )
            for at, variable in nnx.to_flat_state(abstract_state)
        }
        _check(path, wanted, {at: tuple(meta.shape) for at, (_, meta) in found.items()})
        target: dict[str, Any] = {}
        for at, (keys, _) in found.items():
            inner = target
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = wanted[at]
        try:
            restored = _flat(checkpointer.restore(path, target))
        except Exception as error:
            raise _damaged(path, error) from error
    return nnx.from_flat_state(
        [
            (at, variable.replace(restored[tuple(map(str, at))][1]))
            for at, variable in nnx.to_flat_state(abstract_state)
        ]
    )


def _flat(tree: Any) -> dict[tuple[str, ...], tuple[tuple[str, ...], Any]]:
    """Return keys and leaf for each path in the model.

    Keys of an `nnx.State` end with the name of a variable's field.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = [(tuple(str(getattr(key, "key", key)) for key in path), leaf) for path, leaf in flat]
    return {(own[:-1] if own[-1] == "value" else own): (own, leaf) for own, leaf in keys}


def _check(path: Path, wanted: dict[Any, Any], found: dict[Any, tuple[int, ...]]) -> None:
    problems = [
        f"missing parameter {'.'.join(at)} {wanted[at].shape}"
        for at in sorted(wanted.keys() - found.keys())
    ]
    problems += [
        f"parameter {'.'.join(at)} has shape {found[at]}, the configuration says {like.shape}"
        for at, like in sorted(wanted.items())
        if at in found and found[at] != like.shape
    ]
    problems += [
        f"surplus parameter {'.'.join(at)} {found[at]}"
        for at in sorted(found.keys() - wanted.keys())
    ]
    if problems:
        raise CheckpointError(
            str(path),
            problems,
            "the parameters must be those of the decoder that config.json describes, with unrolled "
            "layers: nnx.state(model, nnx.Param)",
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).partition("\n")[0]
    return CheckpointError(str(path), [f"Orbax cannot read it: {reason}"], "write it again")
