"""The implementation that serves a call, of several requested ones, and the reported reasons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import dispatch
from jaxserve.steps.step_function import unkept


def _refuses(x):
    raise NotImplementedError("it is tired")


IMPLEMENTATIONS = {
    "xla": lambda x: x,
    "twice": lambda x: 2 * x,
    "first": _refuses,
    "second": _refuses,
}


def _call(asked: str | None, preferred: tuple[str, ...] = ()):
    return dispatch.call("test", IMPLEMENTATIONS, {"cpu": preferred}, asked, x=jnp.ones(3))


def test_the_first_that_can_serves():
    """The first implementation that does not refuse serves; the reason has the others' refusals."""
    np.testing.assert_array_equal(_call("first,twice"), 2 * np.ones(3))
    choice = dispatch.choices()[-1]
    assert (choice.implementation, choice.reason) == ("twice", "first refused: it is tired")
    assert choice.shapes == "x float32[3]"


def test_none_of_those_asked_for_can():
    """The error has every reason, and no other implementation is used."""
    with pytest.raises(NotImplementedError, match="^it is tired$"):
        _call("first", ("twice",))
    with pytest.raises(NotImplementedError, match="first refused: it is tired; second refused"):
        _call("first,second", ("twice",))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'thrice' is unknown; pass one of"):
        _call("twice,thrice")


def test_without_a_wish_the_platform_chooses():
    """The preferred ones are tried in order, then XLA, with the reasons of the refusals."""
    np.testing.assert_array_equal(_call(None, ("first", "twice")), 2 * np.ones(3))
    np.testing.assert_array_equal(_call(None, ("first",)), np.ones(3))
    choice = dispatch.choices()[-1]
    assert (choice.implementation, choice.reason) == ("xla", "first refused: it is tired")


@pytest.mark.release  # it clears JAX's caches, which other tests use
def test_a_kernel_that_does_not_compile_is_replaced(caplog):
    """XLA refuses a program with it; the program gets the next implementation, and the log says so.

    Calls of other shapes keep the kernel until one of them fails, too.
    """

    def unknown_to_xla(x, scale):
        return jax.ffi.ffi_call("jaxserve_no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(
            x
        )

    implementations = {"kernel": unknown_to_xla, "xla": lambda x, scale: scale * x}

    def step(params, x):
        return params + dispatch.call(
            "test a kernel", implementations, {"cpu": ("kernel",)}, None, x=x, scale=3.0
        )

    shelf = unkept(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for shape in ((2,), (2,), (3,)):
        made = shelf.function("step", step, shape)
        np.testing.assert_array_equal(made(jnp.ones(shape), jnp.ones(shape)), np.full(shape, 4.0))
    choice = dispatch.choices()[-1]
    assert choice.implementation == "xla" and "kernel refused: it does not compile" in choice.reason
    (said,) = [each.getMessage() for each in caplog.records if "test a kernel" in each.getMessage()]
    assert "kernel does not compile on cpu, so that the next implementation" in said

    def wrong(params, x):
        return params @ unknown_to_xla(x, 1.0)

    with pytest.raises(jax.errors.JaxRuntimeError):  # no implementation to replace it
        shelf.function("wrong", wrong)(jnp.ones(2), jnp.ones(2))
