"""Checks of array shapes in signatures while tests run.

The functions of `CHECKED` whose annotations name an array's shape (`Float[Array, "tokens embed"]`)
are decorated with `checked` when they are imported. Other functions are not decorated:
`jaxtyping.install_import_hook`, which decorates all, makes kernel tests take 1.45 times as long.
Only annotations that name shapes are checked; other types are the type checker's.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, get_origin

CHECKED = tuple(
    f"jaxserve.{room}" for room in ("kernels", "models", "predictor", "sharding", "steps")
)
# Number of calls of each function that are checked. It covers all calls that trace, and a part of
# the millions of scheduling calls. Checking all of them makes random traces 1.45 times as long.
NUM_CALLS = 100
# Names of jaxtyping's annotations with a shape; `Array` alone has no shape.
_DTYPES = ("Bool", "Float", "Inexact", "Int", "Key", "Num", "Real", "Shaped", "UInt")

# In the names of compiled modules, so that none was decorated by another version of this one.
_VERSION = sha256(Path(__file__).read_bytes()).hexdigest()[:8]
_SHAPE = re.compile(rf"\b({'|'.join(_DTYPES)})\d*\[".encode())


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of the first `NUM_CALLS` calls of a function."""
    function.__annotations__ = {
        name: annotation
        for name, annotation in function.__annotations__.items()
        if _names_shape(annotation, function.__globals__)
    }
    strict: Callable[..., Any] | None = None
    num_left = NUM_CALLS

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_left, strict
        if num_left == 0:
            return function(*args, **kwargs)
        num_left -= 1
        if strict is None:  # most functions of a module are never called by its importer
            import beartype
            import jaxtyping

            strict = jaxtyping.jaxtyped(function, typechecker=beartype.beartype)
        return strict(*args, **kwargs)

    return call


def is_available() -> bool:
    """Return whether beartype is installed, which only the test extra contains."""
    return find_spec("beartype") is not None


def install() -> None:
    """Check the shapes of modules of `CHECKED` that are imported after this call."""
    sys.meta_path.insert(0, _Finder())


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks in the block, for tests of the errors that functions raise themselves."""
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def with_checks(source: str | bytes, path: str) -> CodeType:
    """Compile a module with checks in its functions."""
    tree = _Decorate().visit(ast.parse(source))
    at = next((i for i, node in enumerate(tree.body) if not _stays_first(node)), len(tree.body))
    tree.body[at:at] = ast.parse(f"from {__name__} import checked as _checked").body
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def _stays_first(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class _Decorate(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        annotations = [each.annotation for each in every if each.annotation] + [node.returns]
        if any(annotation is not None and _has_shape(annotation) for annotation in annotations):
            # The innermost decorator, so that `jax.jit` and `jax.custom_jvp` wrap it.
            node.decorator_list.append(ast.Name("_checked", ast.Load()))
        return node


def _has_shape(annotation: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Subscript) and ast.unparse(node.value).rstrip("0123456789") in _DTYPES
        for node in ast.walk(annotation)
    )


def _names_shape(annotation: str, names: Mapping[str, Any]) -> bool:
    """Whether an annotation has a shape, or the name of an alias, which may have one."""
    expression = ast.parse(annotation, mode="eval").body
    return _has_shape(expression) or any(
        isinstance(node, ast.Name) and get_origin(names.get(node.id)) is not None
        for node in ast.walk(expression)
    )


class _Loader(SourceFileLoader):
    def source_to_code(self, data: bytes, path: str, **options: Any) -> CodeType:
        has_shapes = _SHAPE.search(data) is not None
        return (
            with_checks(data, path) if has_shapes else super().source_to_code(data, path, **options)
        )

    def get_data(self, path: str) -> bytes:
        return super().get_data(_checked(path))

    def set_data(self, path: str, data: bytes, **options: Any) -> None:
        super().set_data(_checked(path), data, **options)


def _checked(path: str) -> str:
    """Return where a module's code with checks is kept, beside the one without."""
    return path.removesuffix(".pyc") + f".{_VERSION}.pyc" if path.endswith(".pyc") else path


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(tuple(f"{name}." for name in CHECKED)):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
