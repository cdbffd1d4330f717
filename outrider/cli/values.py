"""Values of options that are more than a word: sizes, pairs."""

from __future__ import annotations

import re

from outrider.errors import ConfigError, InvalidRequestError

__all__ = ["byte_count", "token_biases"]

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
