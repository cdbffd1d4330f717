"""What a proof generates from where nobody gives prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.llm import LLM

__all__ = ["CONVERSATIONS", "built_in", "varied"]

CUTS = (1.0, 0.85, 0.7, 0.55, 0.4)  # shares of a conversation's last message
QUESTIONS = (
    "",
    "Answer in one short paragraph.",
    "Give three points.",
    "Explain this to a child.",
    "First repeat the most important part word for word.",
    "What is missing here?",
    "Say the same in other words.",
)
TEXTS = (
    "Why does bread rise, and why does it go stale? Tell it in a few sentences.",
    "Write a function in Python that counts how often each word occurs in a text, and one that prints the ten first.",
    "Turn this list into JSON with the keys name, city and age: Ada, Lund, 41; Ben, Porto, 36; Chloe, Gdansk, 29.",
    """Correct only what is wrong, and give the whole text again: The river rise in the hills above the town. In spring
the river carry the melting snow, and the lower fields is under water. In summer the river is a stream again.""",
    """Sum up in two sentences, and quote one of them: The museum opens at nine. Tickets are sold until four. The garden
is free for everybody, the tower costs two coins, and on Mondays all of the museum is closed.""",
    "A train leaves at 14:20 and needs two hours and fifty minutes. When does it arrive, and how do you know?",
)
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = tuple([{"role": "user", "content": text}] for text in TEXTS)
RAW_LENGTH = 24  # ids of a prompt for a model that has no tokenizer


def varied(conversations: Sequence[list[dict[str, Any]]], count: int) -> list[list[dict[str, Any]]]:
    """Make `count` conversations of some: their last message cut at several places, and several questions after it.

    Raises:
        ConfigError: There are not so many.
    """
    most = len(CUTS) * len(QUESTIONS) * len(conversations)
    if not 1 <= count <= most:
        raise ConfigError(f"the number of prompts must be in [1, {most}], got {count}")
    made = []
    for place in range(count):
        variant, talk = divmod(place, len(conversations))
        question, cut = divmod(variant, len(CUTS))
        *before, last = conversations[talk]
        text = last["content"][: int(len(last["content"]) * CUTS[cut])] + "\n\n" + QUESTIONS[question]
        made.append([*before, {**last, "content": text.strip()}])
    return made


def built_in(llm: LLM, count: int) -> list[list[int]]:
    """Give the ids of `count` prompts of our own, as a model takes them; random ids where it has no tokenizer.

    Raises:
        ConfigError: There are not so many.
    """
    conversations = varied(CONVERSATIONS, count)
    tokenizer = llm.tokenizer
    if tokenizer is None:
        draws = torch.Generator().manual_seed(count)
        ids: list[list[int]] = torch.randint(llm.loaded.vocab_size, (count, RAW_LENGTH), generator=draws).tolist()
        return ids
    if getattr(tokenizer, "chat_template", None):
        return [llm.render(one) for one in conversations]
    return [list(tokenizer(one[-1]["content"], verbose=False).input_ids) for one in conversations]
