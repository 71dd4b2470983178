"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxserve.server.schema.base import Reply, Strict

AdapterName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$")]


class LoadAdapterRequest(Strict):
    """An adapter of PEFT to load, and the name of the model that it is from then on."""

    lora_name: AdapterName
    lora_path: Annotated[
        str,
        Field(min_length=1, max_length=4096, description="Below the server's folder of adapters."),
    ]


class UnloadAdapterRequest(Strict):
    """A loaded adapter to drop."""

    lora_name: AdapterName


class UnloadAdapterReply(Reply):
    """An adapter that is no model of the server any more."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True
