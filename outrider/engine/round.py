"""One round: propose, run the target, choose, verify, commit. Everything the engine does turns on this.

Plain decoding is a round with an empty proposal. Nothing here asks the host for a decision or reads a value back:
shapes come from the plan, values stay on the device until the engine collects them. On a card the whole of it is
captured once and replayed (`engine/graphs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outrider.config import Verification
from outrider.kernels.choose import take
from outrider.kernels.launch import uses_kernels
from outrider.kernels.tail import accept_and_commit, pack_and_commit
from outrider.model.kv_cache import TRASH_BLOCK
from outrider.proposal import Acceptance, Proposal, Tree
from outrider.sampling.choose import TokenLogprobs, barred, choose, distribution, logprobs
from outrider.sampling.random import round_seeds
from outrider.sampling.rules import Prefix, Rules
from outrider.verify.coupled import verify_coupled
from outrider.verify.rejection import verify_block, verify_rejection
from outrider.verify.tree import verify_tree_coupled, verify_tree_rejection, verify_tree_typical
from outrider.verify.typical import verify_typical

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.draft.drafter import Drafter
    from outrider.engine.state import DeviceState, Rows
    from outrider.model.runner import Runner

__all__ = ["STUCK", "Drafting", "RoundPlan", "RoundResult", "propose", "verify"]

STUCK = 2  # as `broken` of a packed row, plus the place at which the rules left nothing to choose


@dataclass(frozen=True)
class Drafting:
    """One drafter's share of a round.

    Attributes:
        drafter: Who guesses.
        members: The rows it guesses for, by their place in the plan; none named means all.
        index: The same on the device, ``[b]``; None for all.
    """

    drafter: Drafter
    members: tuple[int, ...] = ()
    index: torch.Tensor | None = None


@dataclass(frozen=True)
class RoundPlan:
    """What the host decided before the round.

    Attributes:
        rows: The rows that take part.
        allowance: Guesses each row may be given at most, ``[B]``.
        num_tokens: K, the most that any row may.
        drafting: Who drafts for whom; rows in none are decoded plainly.
        verification: How guesses are judged.
        num_logprobs: How many likeliest tokens to report on, None for no report.
        fixed_width: Keep the width at K+1 even where fewer guesses were made (exact mode).
    """

    rows: Rows
    allowance: torch.Tensor
    num_tokens: int
    drafting: tuple[Drafting, ...]
    verification: Verification
    num_logprobs: int | None = None
    fixed_width: bool = False


@dataclass(frozen=True)
class RoundResult:
    """What one round gave, still on the device.

    Attributes:
        packed: For each row what `kernels.tail` packs: its K+1 tokens, how many guesses were accepted, how many were
            made, and whether its logits were broken (1: NaN; `STUCK` and more: nothing left), ``[B, K+4]``.
        logprobs: The target's log-probabilities, where anybody asked.
        credited: Of mixtures: which part made each guess that counted, and whether it was accepted, ``[B, 2, K]``: the
            part's number (-1: no guess), and 0 or 1.
    """

    packed: torch.Tensor
    logprobs: TokenLogprobs | None
    credited: torch.Tensor | None = None


def propose(
    plan: RoundPlan, vocab_size: int, on_failure: Callable[[Drafter, Exception], None]
) -> tuple[Proposal, tuple[Drafting, ...]]:
    """First half: let each drafter guess for its rows; give the guesses, and whose they are.

    A drafter that raises costs its rows their guesses and nothing else; `on_failure` is told.
    """
    rows = plan.rows
    proposal = Proposal.empty(len(rows.slots), plan.num_tokens, rows.lengths.device)
    served = []
    for share in plan.drafting:
        try:
            seen = rows.drafting(plan.verification.draws_guesses, share.members)
            if not share.members:  # a row without guesses may lag: it must write nothing where others read
                tables = seen.tables.where(plan.allowance[:, None] > 0, TRASH_BLOCK)
                seen = replace(seen, tables=tables)
            part = share.drafter.propose(seen, plan.num_tokens)
            if part.parents is not None and plan.fixed_width:
                raise ValueError("trees are not possible in exact mode: bits depend on where a path is kept")
            if part.probs is not None and part.probs.shape[-1] != vocab_size:
                raise ValueError(f"q is over {part.probs.shape[-1]} ids, but the target has {vocab_size}")
            proposal = part if share.index is None else proposal.with_rows(share.index, part)
            served.append(share)
        except Exception as error:  # noqa: BLE001 - whatever it is, the target goes on without
            on_failure(share.drafter, error)
    return proposal.limited(plan.allowance, vocab_size), tuple(served)


def verify(plan: RoundPlan, proposal: Proposal, runner: Runner, state: DeviceState) -> RoundResult:
    """Second half: one pass of the target over each row's last token and guesses, then judge and commit."""
    rows, steps = plan.rows, torch.arange(proposal.num_tokens + 1, device=proposal.tokens.device)
    tree = None if proposal.parents is None else proposal.tree()
    fed = torch.cat([rows.tokens.gather(1, rows.lengths[:, None] - 1), proposal.tokens], 1)
    begin = rows.lengths - 1  # kept: the commit moves lengths on
    positions = begin[:, None] + (steps if tree is None else tree.depths)
    context = max(rows.host_lengths) + proposal.num_tokens
    ancestors = None if tree is None else tree.ancestors
    logits = runner.forward(fed, positions, rows.tables, context, rows.start, ancestors)
    after = rows.index, state.tokens, state.lengths, state.limits
    coupled, path = plan.verification is Verification.COUPLED or proposal.num_tokens == 0, None
    stuck = _stuck(rows, tree, logits, fed, positions)
    if tree is None and coupled and uses_kernels(logits.device) and not plan.fixed_width and stuck is None:
        chosen, best = take(logits, rows.rules, _prefix(rows, fed, positions))
        packed = accept_and_commit(chosen, best, proposal.tokens, proposal.lengths, *after)
    else:
        if tree is None:
            acceptance = judge(plan.verification, proposal, logits, rows.rules, _prefix(rows, fed, positions))
        else:
            acceptance = judge_tree(plan.verification, proposal, tree, logits, rows, fed, positions)
            path = acceptance.path
            assert path is not None
            runner.keep_path(rows.tables, begin, path)
            logits = logits.gather(1, path[..., None].expand_as(logits))
            stuck = None if stuck is None else stuck.gather(1, path)
        chosen, committed = acceptance.tokens, steps <= acceptance.num_accepted[:, None]
        broken = (logits.amax(-1).isnan() & committed).any(1).long()  # one NaN is enough
        if stuck is not None:
            stuck &= committed
            broken = torch.where(stuck.any(1) & (broken == 0), STUCK + stuck.int().argmax(1), broken)
        guessed = proposal.positions_guessed(tree)
        packed = pack_and_commit(chosen, acceptance.num_accepted, guessed, broken, *after)
    report = None if plan.num_logprobs is None else logprobs(logits, chosen, plan.num_logprobs)
    return RoundResult(packed, report, _credits(proposal, packed[:, -3], path))


def _stuck(
    rows: Rows, tree: Tree | None, logits: torch.Tensor, fed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor | None:
    """Say where the rules leave nothing to choose, ``[B, K+1]``; None without grammars and with fewer bans than ids."""
    rules = rows.rules
    bans = rules.bad_words.shape[1] * rules.flags.banned + rules.stop_ids.shape[1] * rules.flags.held
    if not rules.flags.masked and bans < logits.shape[-1]:
        return None
    if tree is None:
        return barred(logits, rows.rules, _prefix(rows, fed, positions))
    return barred(*_each_node(logits, rows, tree, fed, positions)).view(positions.shape)


def _credits(proposal: Proposal, accepted: torch.Tensor, path: torch.Tensor | None) -> torch.Tensor | None:
    """Say of each guess whose it was and whether it was accepted: see `RoundResult`."""
    if proposal.sources is None or not proposal.num_tokens:
        return None
    steps = torch.arange(proposal.num_tokens + 1, device=accepted.device)
    taken = steps <= accepted[:, None]  # of fed tokens, by depth
    if path is not None:
        taken = torch.zeros_like(path, dtype=torch.bool).scatter(1, path, taken)
    return torch.stack([proposal.sources.masked_fill(~proposal.within(), -1), taken[:, 1:].long()], 1)


def _prefix(rows: Rows, fed: torch.Tensor, positions: torch.Tensor) -> Prefix:
    """What precedes the choice after each fed token of a chain: the text, with the guesses after it."""
    tokens = rows.tokens
    if fed.shape[1] > 1 and not rows.rules.flags.simple:
        tokens = tokens.scatter(1, positions[:, 1:], fed[:, 1:])
    return Prefix(tokens, positions + 1)


def judge(
    verification: Verification, proposal: Proposal, logits: torch.Tensor, rules: Rules, prefix: Prefix
) -> Acceptance:
    """Decide what to keep: logits ``[B, K+1, V]``, each position with its own prefix."""
    if verification is Verification.COUPLED or proposal.num_tokens == 0:
        return verify_coupled(proposal, choose(logits, rules, prefix))
    p = distribution(logits, rules, prefix)
    if verification is Verification.TYPICAL:
        return verify_typical(proposal, p, choose(logits, rules, prefix))
    judged = verify_block if verification is Verification.BLOCK else verify_rejection
    return judged(proposal, p, round_seeds(rules.seeds, prefix.ends[:, 0]), prefix.ends)


def judge_tree(
    verification: Verification,
    proposal: Proposal,
    tree: Tree,
    logits: torch.Tensor,
    rows: Rows,
    fed: torch.Tensor,
    positions: torch.Tensor,
) -> Acceptance:
    """Decide what to keep of a tree: logits ``[B, N+1, V]``, each node with its own path before it.

    There is no block verification of trees: they are judged by rejection, which is as exact.
    """
    one_each, rules, prefix = _each_node(logits, rows, tree, fed, positions)

    def on_nodes(work: Callable[[torch.Tensor, Rules, Prefix], torch.Tensor]) -> torch.Tensor:
        made = work(one_each, rules, prefix)
        return made.view(*positions.shape, *made.shape[2:])

    if verification is Verification.COUPLED:
        return verify_tree_coupled(proposal, tree, on_nodes(choose))
    p = on_nodes(distribution)
    if verification is Verification.TYPICAL:
        return verify_tree_typical(proposal, tree, p, on_nodes(choose))
    numbers = rows.lengths[:, None] + torch.arange(positions.shape[1], device=positions.device)
    return verify_tree_rejection(proposal, tree, p, round_seeds(rows.rules.seeds, rows.lengths), numbers)


def _each_node(
    logits: torch.Tensor, rows: Rows, tree: Tree, fed: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, Rules, Prefix]:
    """Make every fed token a row of its own, ``[B * (N+1), 1, ...]``, where rules look at what precedes it."""
    if rows.rules.flags.simple:
        return logits, rows.rules, Prefix(rows.tokens, positions + 1)
    num_rows, num_fed = fed.shape
    spare = rows.tokens.shape[1]  # one more column takes what is not on a path
    tokens = torch.nn.functional.pad(rows.tokens, (0, 1)).repeat_interleave(num_fed, 0)
    place = positions[:, None].expand(-1, num_fed, -1).where(tree.above, spare).flatten(0, 1)
    tokens.scatter_(1, place, fed.repeat_interleave(num_fed, 0))
    member = torch.arange(num_rows, device=fed.device).repeat_interleave(num_fed)
    rules = replace(rows.rules, masks=None).picked(member)
    if rows.rules.masks is not None:
        rules = rules.masked(rows.rules.masks.flatten(0, 1)[:, None])
    return logits.flatten(0, 1)[:, None], rules, Prefix(tokens, positions.flatten()[:, None] + 1)
