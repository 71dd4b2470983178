"""Writes the weights of a model as a Hugging Face folder, which transformers and `Runtime` load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors then writes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.core.errors import InvalidConfigError, UnsupportedModelError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.families import family_of, text_config_of, weights_of
from jaxserve.models.function import FunctionConfig
from jaxserve.models.loading import Parameter, abstract_model
from jaxserve.models.quantisation import dense_array
from jaxserve.models.registry import config_json, resolve
from jaxserve.models.tokenizer import Tokenizer

# Files beside the weights.
_KEPT_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
# Fields of a config.json that say how other weights were stored.
_OF_STORED_WEIGHTS = ("quantization_config", "torch_dtype")


def save_pretrained(
    folder: str | Path,
    params: nnx.State,
    config: DecoderConfig,
    like: str | Path | Mapping[str, Any],
    *,
    layer_layout: LayerLayout = "unrolled",
    tokenizer: Tokenizer | None = None,
    file_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder with config.json, the weights as safetensors, and the files of the tokenizer.

    The folder appears when it is complete. The host holds at most one file of weights and one
    parameter at a time.

    Args:
      folder: a path that does not exist, or an empty folder.
      params: of the `Decoder` of this configuration and layout, dense or as a `Runtime` stores
        them; parameters of adapters are left out.
      like: where the fields of config.json come from, and the other files: a name, folder or GGUF
        file, as in `load_model`; or the fields themselves.
      tokenizer: written if `like` is no folder; by default none.
      file_bytes: bytes of tensors in one file; transformers has the same default.

    Raises:
      InvalidConfigError: the folder has files.
      UnsupportedModelError: the weights are in few bits, or the model belongs to no family.
      UnknownModelError, CheckpointError, DownloadError: `like` has no configuration.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidConfigError(
            f"{folder} exists and is not an empty folder; give a new path, or empty it first"
        )
    if isinstance(config, FunctionConfig):
        raise UnsupportedModelError(
            "a FunctionDecoder has no names for its parameters that transformers knows; save "
            "decoder.params, for instance with Orbax, or write a family (docs/adding_a_model.md)"
        )
    origin = like if isinstance(like, Mapping) else resolve(like).fetch(weights=False)
    given = _fields(origin) | {
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": config.dtype,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        new = Path(made) / "folder"
        new.mkdir()
        _write_weights(new, params, config, layer_layout, file_bytes)
        _write_json(new / "config.json", given)
        if isinstance(origin, Path) and origin.is_dir():
            _copy_files(origin, new)
        elif tokenizer is not None:
            tokenizer.save_pretrained(new)
        new.replace(folder)


def _copy_files(origin: Path, folder: Path) -> None:
    """Copy the files that belong to a folder whatever the weights are."""
    for path in sorted({path for pattern in _KEPT_FILES for path in origin.glob(pattern)}):
        target = folder / path.relative_to(origin)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _fields(origin: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model's config.json that do not tell of stored weights."""
    if isinstance(origin, Mapping):
        given = origin
    elif origin.is_dir():
        given = config_json(origin)
    else:
        from jaxserve.models.gguf import GGUFSource  # few saves need it, and every start imports us

        given = GGUFSource(origin).config
    text = text_config_of(given)
    return {name: value for name, value in text.items() if name not in _OF_STORED_WEIGHTS}


def _write_weights(
    folder: Path,
    params: nnx.State,
    config: DecoderConfig,
    layer_layout: LayerLayout,
    file_bytes: int,
) -> None:
    table = weights_of(config)
    dense = nnx.to_flat_state(abstract_model(config, layer_layout=layer_layout)[1])
    parameters = {path: Parameter(path, variable, table) for path, variable in dense}
    stored = dict(nnx.to_flat_state(params))
    tensors = _Tensors(folder, parameters.values(), file_bytes)
    for path, variable in dense:
        array = dense_array(stored, path, variable)
        tensors.dtype = array.dtype
        parameters[path].write(array, tensors.at)
        tensors.write_complete()
    for name, value in family_of(config).constants_of(config).items():
        tensors.add(name, np.asarray(value, config.dtype))
    tensors.finish()


@final
class _Tensors:
    """Tensors that parameters fill part by part, written to files of limited size."""

    dtype: np.dtype  # of the parameter whose tensors are asked for

    def __init__(self, folder: Path, parameters: Iterable[Parameter], file_bytes: int):
        self._folder = folder
        self._file_bytes = file_bytes
        self._missing: dict[str, int] = {}  # parts that were not filled yet, by tensor
        for parameter in parameters:
            for name, _ in parameter.needed():
                self._missing[name] = self._missing.get(name, 0) + 1
        self._open: dict[str, np.ndarray] = {}
        self._complete: dict[str, np.ndarray] = {}
        self._files: list[dict[str, int]] = []  # of each file, the bytes of its tensors

    def at(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the tensor; its next part is being filled."""
        if name not in self._open:
            self._open[name] = np.empty(shape, self.dtype)
        self._missing[name] -= 1
        return self._open[name]

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Take in a small whole tensor."""
        self._complete[name] = tensor

    def write_complete(self) -> None:
        """Write a file if complete tensors fill one."""
        for name in [name for name in self._open if not self._missing[name]]:
            tensor = self._open.pop(name)
            if self._complete and sum(self._sizes().values()) + tensor.nbytes > self._file_bytes:
                self._write()
            self._complete[name] = tensor

    def finish(self) -> None:
        """Write the last file, and give all of them their names."""
        assert not self._open, "tensors that no parameter fills whole"
        self._write()
        if len(self._files) == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        where = {}
        for number, sizes in enumerate(self._files):
            name = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._path(number).rename(self._folder / name)
            where |= dict.fromkeys(sizes, name)
        total = sum(sum(sizes.values()) for sizes in self._files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _write_json(self._folder / "model.safetensors.index.json", index)

    def _sizes(self) -> dict[str, int]:
        return {name: tensor.nbytes for name, tensor in self._complete.items()}

    def _write(self) -> None:
        # transformers refuses files that do not name a framework.
        save_file(self._complete, self._path(len(self._files)), metadata={"format": "pt"})
        self._files.append(self._sizes())
        self._complete = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, default=dict) + "\n", encoding="utf-8")
