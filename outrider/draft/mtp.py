"""A model's own MTP module drafts as an EAGLE head does: from the target's hidden state and the token after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.draft.eagle import EagleDrafter

if TYPE_CHECKING:
    from outrider.draft.tree import TreeShape
    from outrider.model.mtp import MtpHead

__all__ = ["MtpDrafter"]


class MtpDrafter(EagleDrafter):
    """Drafts chains and trees with an MTP module.

    Args:
        head: The module, on the target's device.
        longest: Guesses a round at most that its window allows for.
        shape: How trees grow; None drafts chains.
        name: What statistics call it.
    """

    def __init__(self, head: MtpHead, longest: int, shape: TreeShape | None = None, name: str = "mtp") -> None:
        alike: Any = head  # it has all that the drafter asks of an EAGLE head
        super().__init__(alike, longest, shape, name)
