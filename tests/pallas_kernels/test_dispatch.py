"""The implementation that serves a call, of several requested ones, and the reported reasons."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import dispatch


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
