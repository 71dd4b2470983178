"""Shapes in signatures are checked in tests, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.common import shapes

pytestmark = pytest.mark.skipif(not shapes.is_available(), reason="beartype is not installed")

SOURCE = '''"""A module."""
from __future__ import annotations
from typing import TYPE_CHECKING, Protocol
import jax
import numpy as np
from jaxtyping import Array, Float, Int
if TYPE_CHECKING:
    from elsewhere import Thing

def product(a: Float[Array, "rows columns"], b: Float[Array, " columns"]) -> Float[Array, " rows"]:
    return a @ b if b.shape[0] < 4 else a

@jax.jit
def jitted(a: Float[Array, " rows"], thing: Thing | None = None) -> Float[Array, " rows"]:
    return a

class Size(Protocol):
    size: int

Pair = tuple[Float[Array, " rows"], Float[Array, " rows"]]

def sized(a: Float[Array, " rows"], size: Size) -> Float[Array, " rows"]:
    return a[: size.size]

def first(pair: Pair) -> Float[Array, " rows"]:
    return pair[0]

class Host:
    @classmethod
    def total(cls, a: Int[np.ndarray, " rows"]) -> int:
        return int(a.sum())

def free(a: np.ndarray) -> np.ndarray:
    return a
'''


@pytest.fixture(scope="module")
def module() -> dict:
    names: dict = {}
    exec(shapes.with_checks(SOURCE, "made_up.py"), names)
    return names


def test_arguments_that_fit_pass(module):
    """They pass through jit, in class methods, and beside types for type checkers only."""
    assert module["product"](jnp.ones((2, 3)), jnp.ones(3)).shape == (2,)
    assert module["jitted"](jnp.ones(2), jnp.ones(1)).shape == (2,)
    assert module["Host"].total(np.arange(3)) == 3
    assert module["free"]("not an array") == "not an array"
    assert module["first"]((jnp.ones(2), jnp.ones(2))).shape == (2,)


def test_other_types_are_the_type_checkers(module):
    """A protocol cannot be checked at run time, and an argument beside an array need not be."""
    size = np.arange(3)
    assert module["sized"](jnp.ones(3), size).shape == (3,)
    with pytest.raises(Exception, match="Type-check error"):
        module["sized"](jnp.ones(4), size)


def test_abstract_arrays_are_checked_where_they_are_traced(module):
    """`jax.eval_shape` and `jax.vmap` pass tracers, which have shapes of their own."""
    abstract = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert jax.eval_shape(module["product"], abstract, vector).shape == (2,)
    many = jax.vmap(module["product"], (None, 0))(jnp.ones((2, 3)), jnp.ones((5, 3)))
    assert many.shape == (5, 2)
    with pytest.raises(Exception, match="Type-check error"):
        jax.eval_shape(module["product"], abstract, abstract)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("product", (jnp.ones((2, 3)), jnp.ones(2))),
        ("product", (jnp.ones((2, 4)), jnp.ones(4))),
        ("product", (jnp.ones((2, 3)), jnp.ones(3, int))),
        ("product", (np.ones((2, 3), np.float32), jnp.ones(3))),
        ("jitted", (jnp.ones((2, 1)),)),
        ("first", ((jnp.ones(2), jnp.ones(3)),)),
    ],
)
def test_arguments_and_results_that_do_not_fit_raise(module, name, arguments):
    """Inconsistent axes, a wrong result, dtype or kind of array, and too many axes raise."""
    with pytest.raises(Exception, match="Type-check error"):
        module[name](*arguments)
    with shapes.unchecked():
        if name == "jitted":
            module[name](*arguments)


def test_class_methods_are_checked(module):
    """Class methods are checked in the same way as functions."""
    with pytest.raises(Exception, match="Type-check error"):
        module["Host"].total(np.ones(3))


def test_calls_are_checked_up_to_a_number(module):
    """A function that is called a million times is not checked a million times."""
    free = shapes.checked(module["Host"].total.__func__.__wrapped__)
    for _ in range(shapes.NUM_CALLS):
        with pytest.raises(Exception, match="Type-check error"):
            free(None, np.ones(3))
    assert free(None, np.ones(3)) == 3


def test_modules_of_the_house_are_checked():
    """The hook was installed before their first import."""
    from jaxserve.kernels.matmul import xla
    from jaxserve.predictor import calibration
    from jaxserve.steps.sampling import choice

    for function in (choice.argmax, xla.matmul, calibration.softmax):
        assert function.__code__.co_filename == shapes.__file__
