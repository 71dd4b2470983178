"""The table of what does not go with what: each row refuses, and says what to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.compatibility import Setting, check_together, grouped_windows
from jaxserve.sharding import StagePlan, make_groups, make_mesh

pytestmark = pytest.mark.fast

STAGES = StagePlan.of([1, 1], devices=jax.devices()[:2])
DENSE = SimpleNamespace(has_encoder=False, num_recurrent_layers=0)
RECURRENT = SimpleNamespace(has_encoder=False, num_recurrent_layers=1)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (dict(max_adapters=2), dict(mesh=STAGES), "max_adapters=2 .* a mesh, stages or device"),
        (dict(max_adapters=2), dict(is_placed=True), "max_adapters=2 .* a mesh, stages or device"),
        (dict(max_adapters=2), dict(is_quantised=True), "weights in few bits; omit it"),
        (
            dict(speculation="draft", draft_model="d"),
            dict(mesh=make_mesh(tensor=2)),
            "draft_model= .* omit mesh",
        ),
        (
            dict(speculation="lookup"),
            dict(model_config=RECURRENT, mesh=STAGES),
            "speculation='lookup' .* recurrent layers that is cut into stages; omit it",
        ),
        (dict(quantize="int8"), dict(mesh=make_mesh(stage=2)), "cut into stages; pass a mesh"),
        (dict(disk_memory="1MB"), dict(num_processes=2), "several processes .* pass no disk_mem"),
        ({}, dict(has_probe=True, mesh=STAGES), "probe= .* omit the probe"),
        ({}, dict(has_probe=True, num_processes=2), "probe= .* omit the probe"),
        (
            {},
            dict(model_config=RECURRENT, mesh=make_groups(encode=1, decode=1)),
            "^2 device groups for a model",
        ),
        (
            dict(quantize="int8"),
            dict(is_function=True),
            "^quantize='int8' needs a model whose layers",
        ),
        ({}, dict(is_function=True, mesh=STAGES), "^a mesh with stages needs a model whose layers"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], more: dict[str, Any], message: str
):
    """The same options go with a dense decoder on one device of one process."""
    parsed = RuntimeOptions(**options)
    check_together(Setting(options=parsed, model_config=DENSE))
    with pytest.raises(InvalidConfigError, match=message):
        check_together(Setting(options=parsed, **more))


def test_a_mesh_without_stages_goes_with_recurrent_layers():
    """Each replica has its own states, and each shard all of them."""
    options, mesh = RuntimeOptions(speculation="lookup"), make_mesh(data=2, tensor=2)
    check_together(Setting(options=options, model_config=RECURRENT, mesh=mesh))


@pytest.mark.parametrize(
    ("options", "is_grouped"),
    [
        ({}, True),
        (dict(host_memory=0), True),
        (dict(policy="s3", host_memory="1MB", restore="on_admission"), True),
        (dict(attention="cpu,xla"), True),
        (dict(attention="triton"), False),
        (dict(restore="both"), False),
        (dict(disk_memory="1MB"), False),
        (dict(speculation="lookup"), True),
        (dict(speculation="draft", draft_model="d"), False),
    ],
    ids=str,
)
def test_pages_are_grouped_by_window_where_groups_are_served(
    options: dict[str, Any], is_grouped: bool
):
    """Nothing is refused: what groups do not go with has one group."""
    config = SimpleNamespace(
        has_encoder=False,
        num_recurrent_layers=0,
        layer_kinds=("attention",) * 2,
        attention_chunks=(None,) * 2,
        kv_sources=(None,) * 2,
        sliding_windows=(None, 8),
    )
    setting = Setting(options=RuntimeOptions(**options), model_config=config)
    assert grouped_windows(setting) == ((None, 8) if is_grouped else ())
    assert grouped_windows(replace(setting, mesh=STAGES)) == ()
