"""Links and paths in README.md and docs/ lead to files, headings and modules that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
CODE = (
    *("jaxserve", "predictor", "pallas_kernels", "sharding"),
    *("benchmarks", "scripts", "examples", "tests"),
)

# Files that commands and worked examples write, and that are not in the repository.
WRITTEN = (
    "tuned_tilings.toml",
    "gpu_check_DEVICE.json",
    "epsilon_cutoff.py",
    "shortest_prompt_first.py",
    "prompts_now_and_then.py",
    "benchmarks/drawing.py",
    *(f"soft_cap/{name}.py" for name in ("api", "__init__", "xla", "triton", "shapes")),
)

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|toml|sh|json|cc|ipynb|md)|test_\w+\.py")
_MODULE = re.compile(r"(?:python -m\s+|`)((?:benchmarks|examples)(?:\.\w+)+)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's rules."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts}


def _broken_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(_prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in _anchors(linked)):
            yield target


@cache
def _files() -> tuple[str, ...]:
    """Return the paths of all files that documentation may name, each with a leading slash."""
    found = [path for folder in (*CODE, "docs", "notebooks") for path in (ROOT / folder).rglob("*")]
    return tuple(f"/{path.relative_to(ROOT).as_posix()}" for path in found if path.is_file())


def _missing_paths(page: Path) -> Iterator[str]:
    for code in _INLINE.findall(_prose(page)):
        is_path = _PATH.fullmatch(code) and not code.endswith(WRITTEN)
        if is_path and not any(file.endswith(f"/{code}") for file in _files()):
            yield code


def _missing_modules(page: Path) -> Iterator[str]:
    for module in _MODULE.findall(page.read_text(encoding="utf-8")):
        path = ROOT / module.replace(".", "/")
        if f"{path}.py".endswith(WRITTEN):
            continue
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            yield module


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_resolve(page):
    """Every relative link names a file, and its anchor a heading there."""
    assert not list(_broken_links(page))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paths_in_code_exist(page):
    """A path in backticks is the end of a file's path; a bare `test_*.py` is a test's name."""
    assert not list(_missing_paths(page))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_benchmarks_that_are_named_exist(page):
    """Every `python -m benchmarks.x` names a module that can be run."""
    assert not list(_missing_modules(page))


def test_what_is_missing_is_found(tmp_path):
    """A page with a broken link, anchor, path and module is reported with each of them."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[gone](gone.md) [here](#a-heading) [nowhere](#another) [web](https://x.y)\n"
        "`engine/engine.py` `engine/gone.py` `test_links.py` `test_gone.py`\n"
        "```\n[not a link](in/code.md)\npython -m benchmarks.gone\n```\n"
    )
    assert list(_broken_links(page)) == ["gone.md", "#another"]
    assert list(_missing_paths(page)) == ["engine/gone.py", "test_gone.py"]
    assert list(_missing_modules(page)) == ["benchmarks.gone"]
