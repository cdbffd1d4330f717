"""What a synthetic target says and what its draft guesses, on the host, without any model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["STRETCH", "Saying"]

STRETCH = 256  # agreement is exact over every so many tokens of the cycle: runs then differ less by luck


@dataclass(frozen=True)
class Saying:
    """What the target says, and what the draft guesses: a function of vocabulary, seed and agreement alone.

    Attributes:
        cycle: The vocabulary in the order in which the target says it, ``[V]``.
        following: The token after each token, ``[V]``.
        guesses: The token that the draft says after each token, ``[V]``.
    """

    cycle: torch.Tensor
    following: torch.Tensor
    guesses: torch.Tensor

    @classmethod
    def of(cls, vocab: int, seed: int, agreement: float = 1.0) -> Saying:
        """Draw it; `agreement` is the share of tokens on which `guesses` is `following`."""
        draws = torch.Generator().manual_seed(seed)
        cycle = torch.randperm(vocab, generator=draws)
        following = torch.empty_like(cycle)
        following[cycle] = cycle.roll(-1)
        wrong = cycle[_wrong_places(vocab, agreement, draws)]  # tokens after which the draft errs
        guesses = following.clone()
        guesses[wrong] = following[wrong].roll(1)  # each the successor of another: nobody is right by chance
        return cls(cycle, following, guesses)

    def after(self, token: int, count: int) -> list[int]:
        """Give the target's greedy text after `token`."""
        said = []
        for _ in range(count):
            token = int(self.following[token])
            said.append(token)
        return said

    def mismatches(self, prompt: list[int], tokens: list[int] | tuple[int, ...]) -> int:
        """Count the places where `tokens` is not the greedy text after `prompt`."""
        expected = self.after(prompt[-1], len(tokens))
        return sum(one != other for one, other in zip(expected, tokens, strict=True))

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Give stretches of the cycle, spread over it, that end where a stretch of exact agreement begins."""
        vocab = len(self.cycle)
        spacing = max(1, vocab // count)
        spacing -= spacing % STRETCH if spacing >= STRETCH else 0
        steps = torch.arange(-length, 0)
        return [self.cycle[(place * spacing + steps) % vocab].tolist() for place in range(count)]


def _wrong_places(vocab: int, agreement: float, draws: torch.Generator) -> torch.Tensor:
    """Choose the places of the cycle that the draft gets wrong: at random, as many in every STRETCH."""
    places: list[torch.Tensor] = []
    owed = 0.0
    for begin in range(0, vocab, STRETCH):
        size = min(STRETCH, vocab - begin)
        owed += (1 - agreement) * size
        count = min(size, round(owed))
        owed -= count
        # The place before a token decides it: a stretch's first token is guessed at the last place of the one before.
        places.append(begin - 1 + torch.randperm(size, generator=draws)[:count])
    wrong = torch.cat(places) % vocab
    return wrong if len(wrong) != 1 else torch.cat([wrong, (wrong + vocab // 2) % vocab])  # one alone has no other
