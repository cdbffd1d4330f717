"""`--config FILE`: which options were given, so that they win over the file's."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.console import say
from outrider.cli.groups import current_context
from outrider.config_file import CONFIG_NAME, config_keys, read_config

if TYPE_CHECKING:
    from outrider.cli.options import ModelOptions

__all__ = ["file_settings", "given_options", "mention_config"]


def mention_config(config: Path | None) -> None:
    """Say that a config file lies here, where none was asked for: nothing is loaded that nobody named."""
    if config is None and Path(CONFIG_NAME).is_file():
        say(f"note: the {CONFIG_NAME} here is not used; --config {CONFIG_NAME} loads it")


def file_settings(config: Path | None) -> dict[str, Any]:
    """Read the config file, if one was named.

    Raises:
        ConfigError: It cannot be read, or has an unknown key.
    """
    if config is None:
        return {}
    from outrider.llm import LLM

    return read_config(config, config_keys(LLM.__init__))


def given_options(options: ModelOptions) -> set[str]:
    """Give the names of options that were given, the ones like their defaults too."""
    usual = {one.name: one.default for one in fields(options)}
    differing = {name for name, value in vars(options).items() if value != usual[name]}
    context = current_context()
    if context is None:
        return differing
    return differing | {name for name in usual if _on_command_line(context.get_parameter_source(name))}


def _on_command_line(source: Any) -> bool:
    return source is not None and source.name == "COMMANDLINE"
