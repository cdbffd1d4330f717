"""Options in groups: a frozen dataclass of options that several commands share.

Typer wants one parameter an option. A command here takes whole groups; `from_groups` gives Typer the flat function.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from dataclasses import Field

_context: ContextVar[Any] = ContextVar("context", default=None)

__all__ = ["current_context", "from_groups"]


def from_groups(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Turn a function of option groups (dataclasses) into a function of their fields, which Typer can read.

    Args:
        command: Takes one argument a group.
        without: Fields that are no options of this command; they keep their defaults.
    """
    groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for kind in groups.values():
        hints = get_type_hints(kind, include_extras=True)
        for field in _offered(kind, without):
            default = field.default if field.default_factory is not list else []
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
                )
            )

    def flat(ctx: typer.Context, **given: Any) -> None:
        token = _context.set(ctx)
        made = {
            name: kind(**{field.name: given[field.name] for field in _offered(kind, without)})
            for name, kind in groups.items()
        }
        try:
            command(**made)
        finally:
            _context.reset(token)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _offered(kind: Any, without: Collection[str]) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.name not in without]


def current_context() -> Any:
    """Give the context of the command that runs; None outside of one."""
    return _context.get()
