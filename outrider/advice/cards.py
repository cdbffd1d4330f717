"""Common cards: memory, bandwidth and dense 16-bit products, as their vendors state them.

The vendors' pages could not be opened when this was written. Figures were held against copies where one was found;
those of A10, RTX 3090, RTX 5090 and H100 PCIe, and the pages' addresses, were not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from outrider.advice.prediction import Machine
from outrider.errors import ConfigError

__all__ = ["CARDS", "USABLE_SHARE", "Card", "card_named", "known_card"]

USABLE_SHARE = 0.97
"""Of the stated size, read in GiB: ECC and firmware keep a little (an H100 of 80 GB has about 78 GiB to give, an H200
of 141 GB about 139)."""

_PAGES = "https://www.nvidia.com/en-us/data-center"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_WHITEPAPERS = "https://images.nvidia.com/aem-dam/Solutions/geforce"
_RTX50 = f"{_WHITEPAPERS}/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        name: As people write it.
        memory: Size as stated, in GB.
        bandwidth: GB a second.
        tflops: Dense bf16 or fp16 products with fp32 sums, in TFLOPS (a datasheet's figure with sparsity, halved).
        source: The vendor's page or datasheet: see the module.
        device: Part of what the driver calls it.
    """

    name: str
    memory: int
    bandwidth: int
    tflops: float
    source: str
    device: str

    @property
    def total_bytes(self) -> int:
        """Memory that it is taken to report."""
        return int(self.memory * 2**30 * USABLE_SHARE)

    @property
    def machine(self) -> Machine:
        """For predictions."""
        return Machine(self.bandwidth * 1e9, self.tflops * 1e12)


CARDS = (
    Card("T4", 16, 320, 65.0, f"{_PAGES}/tesla-t4/", "Tesla T4"),
    Card("L4", 24, 300, 121.0, f"{_PAGES}/l4/", "L4"),
    Card("A10", 24, 600, 125.0, f"{_PAGES}/products/a10-gpu/", "A10"),
    Card("RTX 3090", 24, 936, 71.0, _GA102, "RTX 3090"),
    Card("RTX 4090", 24, 1008, 165.2, f"{_WHITEPAPERS}/ada/nvidia-ada-gpu-architecture.pdf", "RTX 4090"),
    Card("RTX 5090", 32, 1792, 209.5, _RTX50, "RTX 5090"),
    Card("A100 40GB", 40, 1555, 312.0, f"{_PAGES}/a100/", "A100-SXM4-40GB"),
    Card("L40S", 48, 864, 362.0, f"{_PAGES}/l40s/", "L40S"),
    Card("A100 80GB", 80, 2039, 312.0, f"{_PAGES}/a100/", "A100-SXM4-80GB"),
    Card("H100 PCIe 80GB", 80, 2000, 756.0, f"{_PAGES}/h100/", "H100 PCIe"),
    Card("H100 80GB", 80, 3350, 989.4, f"{_PAGES}/h100/", "H100 80GB HBM3"),
    Card("H200 141GB", 141, 4800, 989.4, f"{_PAGES}/h200/", "H200"),
)


def card_named(text: str) -> Card:
    """Find a card by name, in any case and spacing: "H100 80GB", "h100-80gb", "H100", "rtx4090".

    Where a name fits several ("A100"), the first of the table is meant.

    Raises:
        ConfigError: There is none; the message lists those that are known.
    """
    plain = _plain(text)
    exact = [card for card in CARDS if _plain(card.name) == plain]
    words = set(re.findall(r"[a-z]+|\d+", text.lower())) - {"nvidia", "geforce", "tesla", "sxm", "gb"}
    loose = [card for card in CARDS if words and words <= set(re.findall(r"[a-z]+|\d+", card.name.lower()))]
    # Of those that fit loosely the one with the shortest name: "H100" is the usual H100, not the PCIe one.
    found = exact or sorted(loose, key=lambda card: (len(card.name), card.memory))
    if found:
        return found[0]
    near = get_close_matches(plain, [_plain(card.name) for card in CARDS], 1)
    hint = next((f"; did you mean {card.name!r}? " for card in CARDS if near and _plain(card.name) == near[0]), "")
    raise ConfigError(
        f"there is no card {text!r} in the table{hint or '; '}known are {', '.join(c.name for c in CARDS)}"
    )


def known_card(device_name: str) -> Card | None:
    """The card that a driver calls so; None for one that is not in the table."""
    fitting = [card for card in CARDS if re.search(rf"\b{re.escape(card.device)}\b", device_name)]
    return max(fitting, key=lambda card: len(card.device), default=None)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
