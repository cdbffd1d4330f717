"""Values of options that are more than a word: sizes, pairs."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from outrider.config import check_drafted, methods_of
from outrider.errors import ConfigError, InvalidRequestError
from outrider.model.checkpoint import check_source

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

__all__ = ["byte_count", "check_models", "check_writable", "checked_method", "one_model", "token_biases"]

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def byte_count(text: str) -> int:
    """Read "512MiB", "512M" (both 2**20 each), "512MB" (10**6 each) or a plain number of bytes.

    Raises:
        ConfigError: It is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", text, re.IGNORECASE)
    if match is None or (match[3].lower() == "i"):
        raise ConfigError(f"--kv-cache-bytes must be a size such as 512MiB or 2G, got {text!r}")
    base = 1000 if match[2] and match[3].lower() == "b" else 1024
    return int(float(match[1]) * base ** _UNITS[match[2].lower()])


def token_biases(pairs: list[str]) -> dict[int, float]:
    """Read ``ID=VALUE`` pairs.

    Raises:
        InvalidRequestError: One is not of that form.
    """
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, amount = pair.partition("=")
        try:
            biases[int(token)] = float(amount)
        except ValueError:
            raise InvalidRequestError(f"--logit-bias must be ID=VALUE, such as 42=-1.5, got {pair!r}") from None
    return biases


def check_writable(option: str, file: Path | None) -> None:
    """Refuse, before any work, a file that could not be written after it; what is there stays as it is.

    Raises:
        ConfigError: It is a folder, or lies where nothing can be written.
    """
    if file is None:
        return
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file} cannot be written: name a file in a folder that exists")
    trial = file if file.exists() else file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with trial.open("ab"):
            pass
        if trial is not file:
            trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{option} {file} cannot be written ({error.strerror}); name a file in a folder that can be written"
        ) from None


def one_model(argument: str | None, option: str | None) -> str | None:
    """Give the target's name, which may stand as the command's argument or behind -m.

    Raises:
        ConfigError: It stands in both places.
    """
    if argument is not None and option is not None:
        raise ConfigError(f"the model is given twice: {argument!r} and --model {option!r}")
    return argument if argument is not None else option


def checked_method(arguments: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Give a method's own name where it is also called otherwise; `config`, where it names one, comes first.

    What is wrong with it is told before torch is imported, which takes seconds.

    Raises:
        ConfigError: There is none of that name, or it needs a draft and none is named.
    """
    name = config.get("method", arguments["method"])
    if name is None:
        return None
    check_drafted(name, config.get("model", arguments["speculative_model"]))
    return "+".join(methods_of(name))


def check_models(arguments: dict[str, Any]) -> None:
    """Refuse a target or a draft that is not there, before one of several engines is loaded.

    Raises:
        ModelLoadError: There is none of that name.
    """
    for name in ("model", "speculative_model"):
        if isinstance(arguments.get(name), str):
            check_source(arguments[name])
