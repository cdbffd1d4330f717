"""A drafter that does what a test wants, and an engine that drafts with it.

`ScriptedDrafter` is S(pattern) of shared/cases.md: it is told how each text really goes on, and plants a wrong id where
the pattern says, so every round's acceptance count is forced. It can also misbehave: see `FAULTS`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from outrider.draft.drafter import WithoutCache
from outrider.llm import LLM
from outrider.proposal import ROOT, Proposal
from outrider.sampling.params import SamplingParams
from tests.tiny import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from outrider.draft.drafter import Drafter, DraftRows
    from outrider.sequence import Sequence

__all__ = [
    "ALL",
    "FAULTS",
    "Fault",
    "ScriptedDrafter",
    "bushy",
    "chi_square_p",
    "engine_with",
    "full_texts",
    "generate_staggered",
    "generate_together",
    "greedy_params",
]

torch.set_num_threads(1)  # tiny products: more threads only wait for each other

ALL = 10**6  # in a pattern: accept everything
Fault = "Callable[[Proposal, int, DraftRows], Proposal]"


class ScriptedDrafter(WithoutCache):
    """Guesses from the true continuation, wrong on purpose.

    Args:
        texts: Full texts (prompt and output); the first that begins with a row's tokens is its truth.
        pattern: How many guesses to get right in a row's first, second, ... round, again and again; `ALL` for all.
        vocab_size: Of the target.
        mass: Also return q, with this much on the guess and the rest even; None returns no q.
        fault: Changes each proposal (or raises), told the number of calls so far.
        context_length: As in `Drafter`.
    """

    name = "scripted"
    device_side = False  # it looks at the tokens
    makes_trees = False

    def __init__(
        self,
        texts: Iterable[Seq[int]] = (),
        *,
        pattern: Seq[int] = (ALL,),
        vocab_size: int = 320,
        mass: float | None = None,
        fault: Callable[[Proposal, int, DraftRows], Proposal] | None = None,
        context_length: int | None = None,
    ) -> None:
        self.texts = [tuple(text) for text in texts]
        self.pattern = tuple(pattern)
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.mass = mass
        self.fault = fault
        self.calls = 0
        self.heard: list[tuple[int, int, int]] = []  # slot, length, accepted: what `commit` was told
        self.released: list[int] = []
        self._rounds: dict[int, int] = {}

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Follow the script."""
        self.calls += 1
        chains = [
            self._chain(slot, tuple(tokens[:length]), num_tokens)
            for slot, tokens, length in zip(rows.slots, rows.tokens.tolist(), rows.host_lengths, strict=True)
        ]
        tokens = torch.tensor(chains, dtype=torch.long).view(len(chains), num_tokens)
        proposal = Proposal(tokens, torch.full((len(chains),), num_tokens), self._probs(tokens))
        made = proposal if self.fault is None else self.fault(proposal, self.calls, rows)
        return made.to(rows.lengths.device)

    def _chain(self, slot: int, known: tuple[int, ...], num_tokens: int) -> list[int]:
        turn = self._rounds[slot] = self._rounds.get(slot, -1) + 1
        right = self.pattern[turn % len(self.pattern)]
        text = next((text for text in self.texts if text[: len(known)] == known), known)
        truth = [*text[len(known) :][:num_tokens]]
        truth += [0] * (num_tokens - len(truth))
        return [token if place < right else (token + 1) % self.vocab_size for place, token in enumerate(truth)]

    def _probs(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self.mass is None:
            return None
        rest = (1 - self.mass) / (self.vocab_size - 1)
        probs = torch.full((*tokens.shape, self.vocab_size), rest)
        return probs.scatter(-1, tokens[..., None], self.mass)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Keep what was told, for tests to look at."""
        self.heard.extend(zip(slots, lengths, accepted, strict=True))

    def release(self, slot: int) -> None:
        """The next holder of the slot starts the pattern anew."""
        self.released.append(slot)
        self._rounds.pop(slot, None)


def _raises(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    if call % 2:
        raise RuntimeError("out of luck")
    return proposal


def _nan_probs(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    probs = torch.full((*proposal.tokens.shape, 320), 1 / 320)
    probs[:, call % proposal.num_tokens] = math.nan
    return Proposal(proposal.tokens, proposal.lengths, probs)


def _out_of_range(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    tokens = proposal.tokens.clone()
    tokens[:, call % proposal.num_tokens] = (-1, 320, 2**40)[call % 3]
    return Proposal(tokens, proposal.lengths, proposal.probs)


def _too_long(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    return Proposal(proposal.tokens, proposal.lengths + 7, proposal.probs)


def _too_wide(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    return Proposal(proposal.tokens.repeat(1, 2), proposal.lengths * 2)


def _scribbles(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    rows.tokens.scatter_(1, rows.lengths[:, None].clamp(max=rows.tokens.shape[1] - 1), 77)
    return proposal


def _upside_down(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    parents = torch.full_like(proposal.tokens, call % (proposal.num_tokens + 2) - 1)
    return Proposal(proposal.tokens, proposal.lengths, None, parents)


def bushy(proposal: Proposal, call: int, rows: DraftRows) -> Proposal:
    """Make trees of chains, as wide: a wrong sibling before or after each guess, and a child of it now and then."""
    tokens, parents = [], []
    for row, chain in enumerate(proposal.tokens.tolist()):
        nodes: list[tuple[int, int]] = []  # token, parent
        last = ROOT
        for depth, token in enumerate(chain):
            decoy = (token + 7, last)
            before = (call + row + depth) % 3 == 0
            nodes += [decoy, (token, last)] if before else [(token, last), decoy]
            last = len(nodes) - (1 if before else 2)
            if (call + depth) % 4 == 0:  # a repeated guess, and a child of the wrong one
                nodes += [(token, nodes[last][1]), (token, len(nodes) - (2 if before else 1))]
        tokens.append([token % 320 for token, _ in nodes[: len(chain)]])
        parents.append([parent for _, parent in nodes[: len(chain)]])
    shape = proposal.tokens.shape
    return Proposal(
        torch.tensor(tokens).view(shape), proposal.lengths, None, torch.tensor(parents, dtype=torch.long).view(shape)
    )


FAULTS: dict[str, Callable[[Proposal, int, DraftRows], Proposal]] = {
    "raises every other time": _raises,
    "NaN in q": _nan_probs,
    "ids out of range": _out_of_range,
    "lengths beyond the chain": _too_long,
    "twice as many columns": _too_wide,
    "scribbles on its copy": _scribbles,
    "a tree that grows downwards": _upside_down,
}


def engine_with(drafter: Drafter | None, model: Any, *, lookahead: int = 16, **settings: Any) -> LLM:
    """Give an `LLM` over a loaded model that drafts with `drafter`.

    The drafter comes in where `LLM` makes its own, so intake, engine and books all know of it from the start.
    """

    class Scripted(LLM):
        def _drafter(self, *_: object) -> Drafter | None:
            return drafter

    settings.setdefault("tokenizer", byte_tokenizer())
    method = "none" if drafter is None else "ngram"
    settings = {"dtype": "float32", "device": "cpu", **settings}
    return Scripted(model, method=method, num_speculative_tokens=lookahead, **settings)


def generate_together(llm: LLM, jobs: Seq[tuple[Seq[int], SamplingParams]]) -> list[list[Sequence]]:
    """Run requests of any settings in one batch, and give their sequences."""
    made = [llm.intake.sequences(llm.intake.request(list(prompt), params)) for prompt, params in jobs]
    for sequence in [one for group in made for one in group]:
        llm.engine.add(sequence)
    while llm.engine.busy:
        llm.engine.step()
    return made


def generate_staggered(llm: LLM, jobs: Seq[tuple[Seq[int], SamplingParams]], every: int = 2) -> list[list[Sequence]]:
    """Let a new request arrive after every few steps, so that prompts and rounds of all phases meet."""
    made: list[list[Sequence]] = []
    while len(made) < len(jobs) or llm.engine.busy:
        if len(made) < len(jobs):
            prompt, params = jobs[len(made)]
            made.append(llm.intake.sequences(llm.intake.request(list(prompt), params)))
            for sequence in made[-1]:
                llm.engine.add(sequence)
        for _ in range(every):
            llm.engine.step()
    return made


def full_texts(llm: LLM, prompts: Seq[Seq[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    """Give prompt and output together, as `llm` (a plain one) makes them: what a `ScriptedDrafter` wants to know."""
    outputs = llm.generate(prompt_token_ids=[list(prompt) for prompt in prompts], sampling_params=params)
    return [one.prompt_token_ids + sample.token_ids for one in outputs for sample in one.outputs]


def greedy_params(max_tokens: int, speculation: int | str = "auto", **others: Any) -> SamplingParams:
    """Greedy, on past any end-of-sequence."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, speculation=speculation, ignore_eos=True, **others)


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the chi-square test's p-value; cells that expect less than 5 are pooled."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    assert float(observed[expected == 0].sum()) == 0, "something impossible was drawn"
    small = expected < 5
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
