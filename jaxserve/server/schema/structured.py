"""What an answer has to match: formats and tools."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxserve.server.schema.base import JsonObject, Strict


class TextResponseFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectResponseFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON schema. It is enforced with and without `strict`."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaResponseFormat(Strict):
    """JSON that validates."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def given_schema(self) -> JsonObject:
        """The schema itself."""
        return self.json_schema.schema_


ResponseFormat = Annotated[
    TextResponseFormat | JsonObjectResponseFormat | JsonSchemaResponseFormat,
    Field(discriminator="type"),
]


class JsonSchemaTextFormat(JsonSchema):
    """JSON that validates, as `/v1/responses` writes it."""

    type: Literal["json_schema"]

    @property
    def given_schema(self) -> JsonObject:
        """The schema itself."""
        return self.schema_


TextFormat = Annotated[
    TextResponseFormat | JsonObjectResponseFormat | JsonSchemaTextFormat,
    Field(discriminator="type"),
]


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object.

    Where a call is demanded, the schema is enforced with and without `strict`.
    """

    name: Annotated[str, Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class ResponseTool(Function):
    """A tool, as `/v1/responses` writes it."""

    type: Literal["function"]

    def as_tool(self) -> Tool:
        """Return it as a chat writes it."""
        function = Function(**self.model_dump(exclude={"type"}))
        return Tool(type="function", function=function)


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class NamedResponseTool(NamedFunction):
    """The tool that has to be called, as `/v1/responses` writes it."""

    type: Literal["function"]

    def as_tool(self) -> NamedTool:
        """Return it as a chat writes it."""
        return NamedTool(type="function", function=NamedFunction(name=self.name))


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool
