"""Device groups: their devices, and what is refused."""

from __future__ import annotations

import jax
import pytest

from jaxserve.sharding import DeviceGroups, StagePlan, make_groups, make_mesh


def test_groups_have_devices_of_their_own():
    """The decode group has the devices after those of the encode group."""
    devices = tuple(jax.devices())
    groups = make_groups(encode=2, decode=4)
    assert groups.devices == (devices[:2], devices[2:6])
    assert str(groups) == "2 devices for prompts and 4 for answers"
    staged = DeviceGroups(make_mesh(), StagePlan.of([1, 2], tensor=[2, 1], devices=devices[1:]))
    assert staged.devices == (devices[:1], devices[1:4])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_groups(encode=4, decode=5), "need 9, but there are 8"),
        (lambda: make_groups(encode=0), "tensor=0 is not allowed"),
        (lambda: make_groups(decode=True), "tensor=True is not allowed"),
        (lambda: DeviceGroups(make_mesh(tensor=2), make_mesh()), "in both device groups"),
        (
            lambda: DeviceGroups(make_mesh(), make_mesh(data=2, devices=jax.devices()[1:])),
            "decode group has a data axis of 2",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(make, message):
    """The error has the given value and a remedy."""
    with pytest.raises(ValueError, match=message):
        make()
