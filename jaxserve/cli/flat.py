"""Options in groups: a command takes a dataclass, whose fields are options on the command line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, cast, get_type_hints

Command = Callable[..., None]


def flat(*, omit: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator that replaces each dataclass parameter of a command by its fields.

    Typer reads the signature that results, and the command gets the dataclasses. A field has the
    annotation of an option, and its default is the option's default.

    Args:
      omit: fields that are not options of this command, and keep their defaults.

    Raises:
      TypeError: `omit` has a name that is not a field, or two options have one name.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, tuple[Any, list[str]]] = {}
        shown: list[inspect.Parameter] = []
        unknown = set(omit)
        for name, parameter in inspect.signature(command).parameters.items():
            group = hints[name]
            if not dataclasses.is_dataclass(group):
                shown.append(_option(name, group, parameter.default))
                continue
            annotations = get_type_hints(group, include_extras=True)
            fields = [field for field in dataclasses.fields(group) if field.name not in omit]
            unknown -= {field.name for field in dataclasses.fields(group)}
            groups[name] = (group, [field.name for field in fields])
            shown += [_option(each.name, annotations[each.name], each.default) for each in fields]
        names = [parameter.name for parameter in shown]
        twice = {name for name in names if names.count(name) > 1}
        if unknown or twice:
            raise TypeError(
                f"{command.__name__}: {sorted(unknown)} to omit are not fields, and "
                f"{sorted(twice)} are options twice"
            )

        @functools.wraps(command)
        def flattened(**given: Any) -> None:
            made = {
                name: group(**{field: given.pop(field) for field in fields})
                for name, (group, fields) in groups.items()
            }
            command(**given, **made)

        cast(Any, flattened).__signature__ = inspect.Signature(shown)
        return flattened

    return decorate


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )
