"""The implementation that serves a call, of several requested ones, and the reported reasons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

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


def _unknown_to_xla(x):
    return jax.ffi.ffi_call("jaxserve_no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def _not_lowered(error: Exception | None):
    """Return a call that JAX traces and cannot lower: for lack of a rule, or with this error."""
    primitive = Primitive("jaxserve_not_lowered")
    primitive.def_abstract_eval(lambda x: x)
    if error is not None:

        def fail(context, x):
            raise error

        mlir.register_lowering(primitive, fail)
    return lambda x: primitive.bind(x)


@pytest.mark.release  # it clears JAX's caches, which other tests use
@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("unknown to XLA", _unknown_to_xla),
        ("without a rule", _not_lowered(None)),
        ("with an error", _not_lowered(ValueError("a bad layout"))),
    ],
)
def test_a_kernel_that_does_not_compile_is_replaced(caplog, kind, broken):
    """XLA or Pallas refuses a program with it, which gets the next implementation, with a warning.

    Calls of other shapes keep the kernel until one of them fails, too. Another thread may have
    traced a part of the program meanwhile.
    """
    implementations = {"kernel": lambda x, scale: broken(x), "xla": lambda x, scale: scale * x}
    operation = f"test a kernel {kind}"

    @jax.jit
    def part(x):
        return dispatch.call(operation, implementations, {"cpu": ("kernel",)}, None, x=x, scale=3.0)

    def step(params, x):
        return params + part(x)

    shelf = unkept(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for shape in ((2,), (2,), (3,)):
        jax.eval_shape(part, jnp.ones(shape))
        made = shelf.function("step", step, shape)
        np.testing.assert_array_equal(made(jnp.ones(shape), jnp.ones(shape)), np.full(shape, 4.0))
    choice = dispatch.choices()[-1]
    assert choice.implementation == "xla" and "kernel refused: it does not compile" in choice.reason
    (said,) = [each.getMessage() for each in caplog.records if operation in each.getMessage()]
    assert "xla serves some calls on cpu: kernel refused: it does not compile: " in said

    def wrong(params, x):
        return params @ broken(x)

    with pytest.raises((jax.errors.JaxRuntimeError, NotImplementedError, ValueError)):
        shelf.function("wrong", wrong)(jnp.ones(2), jnp.ones(2))  # nothing replaces it


@pytest.mark.release
def test_a_lack_of_memory_is_not_laid_to_a_kernel():
    """XLA takes memory to tune a program; each kernel would be compiled alone, and be replaced."""
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
    implementations = {"kernel": _not_lowered(error), "xla": lambda x: x}

    def step(params, x):
        return dispatch.call("test memory", implementations, {"cpu": ("kernel",)}, None, x=x)

    shelf = unkept(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(RuntimeError, match="Out of memory"):
        shelf.function("step", step)(jnp.ones(2), jnp.ones(2))
    assert dispatch.choices()[-1].implementation == "kernel"


def test_a_choice_of_an_earlier_start_warns_too(caplog):
    """The store has programs in which a kernel was replaced; a start that loads one says so."""
    reason = "triton refused: it does not compile: INTERNAL: ptxas failed"
    dispatch.add(dispatch.Choice("test earlier", "xla", "cuda", reason, "x float32[3]"))
    (said,) = [each for each in caplog.records if "test earlier" in each.getMessage()]
    assert said.levelname == "WARNING" and reason in said.getMessage()
