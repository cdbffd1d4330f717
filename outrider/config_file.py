"""`outrider.toml`: the arguments of `LLM` in a file, one a line."""

from __future__ import annotations

import inspect
import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.config import SpeculationConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CONFIG_NAME", "config_keys", "merged", "read_config", "written_config"]

CONFIG_NAME = "outrider.toml"
# What a file cannot hold, or what is another spelling of keys that it can.
_NOT_IN_FILES = ("self", "speculative_config", "tokenizer", "drafting")
_SPELLED_OTHERWISE = ("model", "method", "num_speculative_tokens", "verification")  # of `SpeculationConfig`


def config_keys(constructor: Callable[..., Any]) -> tuple[str, ...]:
    """Give the keys that a file may have: the arguments of `LLM` that a file can hold."""
    named = [name for name in inspect.signature(constructor).parameters if name not in _NOT_IN_FILES]
    more = [field.name for field in fields(SpeculationConfig) if field.name not in _SPELLED_OTHERWISE]
    return tuple(dict.fromkeys([*named, *more]))


def read_config(path: str | Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read a file's arguments; what they may be is for `LLM` to check.

    Raises:
        ConfigError: The file is missing, not TOML, or has a key that is none of `keys`.
    """
    file = Path(path).expanduser()
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {file} cannot be read ({type(error).__name__}); check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file {file} is not TOML: {error}") from None
    unknown = sorted(set(found) - set(keys))
    if unknown:
        raise ConfigError(
            f"{file} does not know {', '.join(map(repr, unknown))}; its keys are {', '.join(sorted(keys))}"
        )
    return found


def merged(found: dict[str, Any], explicit: dict[str, Any]) -> dict[str, Any]:
    """Put explicit arguments over a file's. Who names a method or a draft sets all the file's drafting aside."""
    anew = {"method", "speculative_model", "speculative_config"} & set(explicit)
    drafting = {field.name for field in fields(SpeculationConfig)} - {"model", "verification", "allow_failure"}
    aside = drafting | {"speculative_model", "draft_dtype", "draft_device"} if anew else set()
    return {name: value for name, value in found.items() if name not in aside} | explicit


def written_config(values: dict[str, Any], comments: Sequence[str] = ()) -> str:
    """Give a file's text; values that are None are left out.

    Raises:
        ConfigError: A value is none that a file can hold.
    """
    lines = [f"# {line}".rstrip() for line in comments]
    for name, value in values.items():
        if value is not None:
            lines.append(f"{name} = {_written(name, value)}")
    return "\n".join(lines) + "\n"


def _written(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings are TOML's
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(name, one) for one in value)}]"
    raise ConfigError(f"{name}={value!r} cannot be written to a file; pass its name or path instead")
