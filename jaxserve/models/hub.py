"""Names of the Hugging Face Hub: `org/name`, `org/name@revision`, `org/name:Q4_K_M`.

Files go to the Hub's own cache, which other libraries share (`HF_HOME`); `HF_TOKEN`,
`HF_HUB_OFFLINE` and `HF_ENDPOINT` have their usual meaning. Without a network, the cache serves.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from tqdm.asyncio import tqdm_asyncio

from jaxserve.core.errors import DownloadError, UnknownModelError

# A folder with a tokenizer has at least one of these files. Those after the third are of folders
# without a tokenizer.json: the names that transformers knows.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tekken.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
# Files that a folder may need. Other forms of the same weights, and subfolders, are left out.
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "model*.safetensors",
    "model.safetensors.index.json",
    *TOKENIZER_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*_Pooling/config.json",
)
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^:@\s]+))?(?::(?P<file>[^:\s]+))?"
)
# Downloads that take longer than this show a bar.
_BAR_AFTER_S = 2.0


@final
@dataclass(frozen=True)
class HubModel:
    """A repository of the Hub, or one GGUF file of it."""

    repo: str  # such as "Qwen/Qwen3-0.6B"
    revision: str | None = None  # a branch, tag or commit; None for the default branch
    # A GGUF file's name, or the end of it, such as "Q4_K_M"; None for a model folder.
    file: str | None = None

    @classmethod
    def of(cls, name: str) -> HubModel | None:
        """Return the model of a name; None if it does not have the form of the Hub's names."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(**found.groupdict())

    def at(self, revision: str) -> HubModel:
        """Return the model at a revision; raise UnknownModelError if the name has one."""
        if self.revision not in (None, revision):
            raise UnknownModelError(
                f"{self} names a revision, and revision={revision!r} is another; pass one of them"
            )
        return replace(self, revision=revision)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.file}" if self.file else "")

    def fetch(self, *, weights: bool = True, progress: bool = True) -> Path:
        """Return the folder or GGUF file in the Hub's cache; download missing files first.

        An interrupted download is resumed. If the Hub cannot be reached, the cache serves.
        Without `weights`, a folder has only the other files.

        Raises:
          UnknownModelError: there is no such repository, revision or file, or it is private or
            gated.
          DownloadError: a file is neither in the cache nor available.
        """
        patterns = [p for p in self._patterns if weights or not p.endswith(".safetensors")]
        folder = self._downloaded(patterns, progress)
        if self.file is None:
            if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
                return folder
            raise UnknownModelError(
                f"{self} has no config.json; pass org/name of a model in safetensors, or "
                "org/name:Q4_K_M for that GGUF file of a repository"
            )
        files = [path for pattern in self._patterns for path in sorted(folder.rglob(pattern))]
        files = list(dict.fromkeys(files))
        if len(files) == 1:
            return files[0]
        names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise UnknownModelError(
            f"{self} are several files: {names}; name one of them in full"
            if files
            else f"{self.repo} has no GGUF file that ends in {self.file!r}; look for its files at "
            f"{_endpoint()}/{self.repo}/tree/{self.revision or 'main'}"
        )

    @property
    def _patterns(self) -> tuple[str, ...]:
        if self.file is None:
            return _FOLDER_FILES
        if self.file.endswith(".gguf"):
            return (self.file,)
        ends = dict.fromkeys((self.file, self.file.upper(), self.file.lower()))
        return tuple(f"*{separator}{end}.gguf" for end in ends for separator in "-._")

    def _downloaded(self, patterns: list[str], progress: bool) -> Path:
        import huggingface_hub  # takes as long as the rest of the command line
        from huggingface_hub import errors

        try:
            folder = huggingface_hub.snapshot_download(
                self.repo,
                revision=self.revision,
                allow_patterns=patterns,
                tqdm_class=_LateBar if progress else _NoBar,
            )
        except errors.GatedRepoError as error:
            raise UnknownModelError(
                f"{self.repo} is gated; accept its terms at {_endpoint()}/{self.repo}, and set "
                "HF_TOKEN to a token of that account"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UnknownModelError(
                f"{self.repo} has no revision {self.revision!r}; pass a branch, a tag or a commit"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise UnknownModelError(
                f"the Hub has no repository {self.repo!r}, or it is private; check the name, or "
                "set HF_TOKEN to a token that may read it"
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise DownloadError(
                f"{self} is not in the cache {huggingface_hub.constants.HF_HUB_CACHE}, and "
                f"{_why_not(error)}; start once with a network, or pass a folder"
            ) from error
        except OSError as error:  # the Hub's own errors, too
            raise DownloadError(
                f"{self} could not be downloaded: {_first_line(error)}; start again, which resumes"
            ) from error
        return Path(folder)


def _why_not(error: Exception) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE forbids a download"
    return f"{_endpoint()} cannot be reached ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@final
class _LateBar(tqdm_asyncio):
    """A bar that appears when a download takes seconds."""

    def __init__(self, *args: Any, **options: Any):
        self._begin_s = time.monotonic()
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() - self._begin_s > _BAR_AFTER_S:
            super().display(msg, pos)


@final
class _NoBar(tqdm_asyncio):
    def __init__(self, *args: Any, **options: Any):
        options["disable"] = True
        super().__init__(*args, **options)
