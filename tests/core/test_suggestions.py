"""Names that do not exist are answered with the ones that do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import get_type_hints

import ml_dtypes
import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError, InvalidSamplingParamsError
from jaxserve.core.options import RuntimeKeywords, RuntimeOptions, parse_dtype
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.suggestions import OPTIONS_ELSEWHERE, PARAMS_ELSEWHERE

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_model_len", "max_model_len is not known here; pass max_context$"),
        ("dtype", "pass dtype to from_pretrained; a model that is given keeps its own$"),
        ("polcy", r"polcy is not known; did you mean policy\?$"),
        ("xyz", "xyz is not known; known are policy, latency_bound, .*progress$"),
    ],
)
def test_unknown_options(name, said):
    """The name of vLLM, a typing error, and a name like none."""
    with pytest.raises(InvalidConfigError, match=said):
        RuntimeOptions.parse({name: 1})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_new_tokens", "max_new_tokens is not known here; pass max_tokens$"),
        ("temprature", r"temprature is not known; did you mean temperature\?$"),
        ("xyz", "xyz is not known; known are max_tokens, .*template_kwargs$"),
    ],
)
def test_unknown_sampling_parameters(name, said):
    """Likewise; the check leaves copies and pickles alone."""
    with pytest.raises(InvalidSamplingParamsError, match=said):
        SamplingParams(**{name: 1})
    params = SamplingParams(temperature=1.0, stop="x")
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params
    assert replace(params, n=2) == SamplingParams(temperature=1.0, stop="x", n=2)


def test_names_of_other_engines_are_none_of_ours():
    """A name that becomes one here leaves the table."""
    assert not OPTIONS_ELSEWHERE.keys() & {field.name for field in fields(RuntimeOptions)}
    assert not PARAMS_ELSEWHERE.keys() & {field.name for field in fields(SamplingParams)}


def test_editors_know_all_options():
    """The keywords of `Runtime` are the fields of its options, with their types."""
    assert get_type_hints(RuntimeKeywords) == get_type_hints(RuntimeOptions)


@pytest.mark.parametrize("given", ["bfloat16", "bf16", np.dtype("bfloat16"), ml_dtypes.bfloat16])
def test_dtypes_by_other_names(given):
    """Other engines' names, NumPy's dtypes and types; "auto" is the default."""
    assert parse_dtype(given) == "bfloat16"
    assert parse_dtype("half") == "float16"
    assert parse_dtype("auto") is None
    assert RuntimeOptions(kv_dtype="fp8").kv_dtype == "float8_e4m3fn"
    with pytest.raises(InvalidConfigError, match="dtype='int8' is not allowed; give one of"):
        parse_dtype("int8")


def test_all_tokens_are_kept_by_zero_and_by_minus_one():
    """As over HTTP."""
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(InvalidSamplingParamsError, match="top_k=-2 is not allowed"):
        SamplingParams(top_k=-2)
