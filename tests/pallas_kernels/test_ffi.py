"""Calls of C++ kernels by XLA: what passes, and errors for operands that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import build

pytestmark = pytest.mark.skipif(not build.has_compiler(), reason="there is no C++ compiler")

SOURCE = """
#include "threads.h"

namespace {
using Matrix = ffi::Buffer<ffi::F32, 2>;

ffi::Error scaled(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer any, ffi::Result<Matrix> y,
                  ffi::Result<ffi::Buffer<ffi::S32, 1>> about,
                  float by, int32_t plus, int64_t most, bool fails,
                  ffi::Span<const int32_t> numbers) {
  if (fails) return ffi::Error::InvalidArgument("scaled: asked to fail");
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  for_each_item(pool, rows, rows, [=](int64_t row, const NextItem&) mutable {
    for (int64_t i = row * width; i < (row + 1) * width; ++i)
      y->typed_data()[i] = x.typed_data()[i] * by + static_cast<float>(plus);
  });
  int32_t* to = about->typed_data();
  to[0] = any.size_bytes(), to[1] = most >> 32, to[2] = numbers.size(), to[3] = 0;
  for (const int32_t number : numbers) to[3] += number;
  return ffi::Error::Success();
}
}  // namespace

HANDLER(Scaled, scaled, "by", "plus", "most", "fails", "numbers")
"""
ATTRIBUTES = {
    "by": np.float32(2),
    "plus": np.int32(1),
    "most": np.int64(5) << 32,
    "fails": False,
    "numbers": np.array([3, 4, 5], np.int32),
}
X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A function that calls the kernel with operands and attributes."""
    source: Path = tmp_path_factory.mktemp("kernels") / "scaled.cc"
    source.write_text(SOURCE)
    target = build.cpu_target(source, "Scaled")

    def called(*operands: np.ndarray, **attributes):
        shapes = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct((4,), np.int32)
        return jax.ffi.ffi_call(target, shapes)(*operands, **attributes)

    return called


def test_operands_results_and_attributes_pass(call: Callable):
    """Every kind that a kernel may have; sizes are those of the dtype."""
    y, about = call(X, np.zeros((2, 5), np.float16), **ATTRIBUTES)
    np.testing.assert_array_equal(y, 2 * X + 1)
    assert about.tolist() == [20, 5, 3, 12]
    _, about = call(
        X, jnp.zeros(0, jnp.bfloat16), **ATTRIBUTES | {"numbers": np.zeros(0, np.int32)}
    )
    assert about.tolist() == [0, 5, 0, 0]


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ((X.astype(np.int32), X), {}, "Scaled: operand 0 is missing, or its dtype or rank"),
        ((X[0], X), {}, "Scaled: operand 0"),
        ((X,), {}, "Scaled: operand 1"),
        ((X, X, X), {}, "Scaled: the number of operands or results does not match the kernel"),
        ((X, X.astype(np.uint32)), {"by": np.int32(7)}, "Scaled: attribute by"),
        ((X, X), {"numbers": np.zeros(3, np.float32)}, "Scaled: attribute numbers"),
        ((X, X), {"most": np.float32(1)}, "Scaled: attribute most"),
        ((X, X), {"fails": True}, "scaled: asked to fail"),
        ((X, jnp.zeros(3, jnp.int4)), {}, "Scaled: operand 1"),
    ],
)
def test_what_does_not_fit_is_an_error(call: Callable, operands, attributes, message: str):
    """The error names the operand or the attribute; the next call succeeds."""
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(call(*operands, **ATTRIBUTES | attributes))
    np.testing.assert_array_equal(call(X, X, **ATTRIBUTES)[0], 2 * X + 1)


def test_a_missing_attribute_is_an_error(call: Callable):
    """A misspelt name does not count as it."""
    attributes = {("plux" if name == "plus" else name): v for name, v in ATTRIBUTES.items()}
    with pytest.raises(Exception, match="Scaled: attribute plus is missing"):
        jax.block_until_ready(call(X, X, **attributes))
