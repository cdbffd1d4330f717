"""Do the tests bite? Each deliberate fault below must make a named check fail, and without the fault the check passes.

The checks are the ones the real tests use. A fault that changes only speed is caught by a check of acceptance.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider.config import Verification
from outrider.draft import chain as chain_module
from outrider.draft import draft_model as draft_module
from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.engine import engine as engine_module
from outrider.engine import round as round_module
from outrider.engine.constraint import Constraint
from outrider.engine.grammar_compiler import CompiledGrammar
from outrider.engine.scheduler import Scheduler
from outrider.model import attention as attention_module
from outrider.model.attention import Step
from outrider.model.kv_cache import BLOCK_SIZE, KVCache
from outrider.proposal import Acceptance, Proposal
from outrider.sampling import choose as choose_module
from outrider.sampling import rules as rules_module
from outrider.sampling.params import SamplingParams
from outrider.sampling.rules import Prefix, Rules
from outrider.verify import coupled as coupled_module
from outrider.verify import rejection as rejection_module
from tests import test_grammar, test_lossless, test_rollback, test_sampling, test_verify
from tests.scripted import ALL, ScriptedDrafter, engine_with, greedy_params
from tests.tiny import greedy, tiny_family

if TYPE_CHECKING:
    from collections.abc import Callable

Patch = pytest.MonkeyPatch
PROMPT = test_lossless.PROMPTS[17]


# --- the checks, most of them from the tests themselves


def texts_equal_base(settings: tuple[str, ...], pattern: tuple[int, ...] = (2, 0, ALL), **more: Any) -> None:
    """A fresh engine with a scripted drafter against BASE, for some settings in one batch."""
    llm = engine_with(ScriptedDrafter(pattern=pattern), test_lossless.target(), **more)
    jobs = [(PROMPT, test_lossless.params_for(name, 4)) for name in settings]
    test_lossless.check_equal_to_base(llm, jobs)


def greedy_equals_base() -> None:
    texts_equal_base(("greedy",))


def sampled_equals_base() -> None:
    texts_equal_base(("warm", "top_k"))


def penalised_equals_base() -> None:
    texts_equal_base(("presence", "frequency"), pattern=(ALL,))


def biased_equals_base() -> None:
    texts_equal_base(("logit_bias", "bad_words"), pattern=(ALL,))


def min_tokens_equals_base() -> None:
    texts_equal_base(("min_tokens and end",), pattern=(ALL,))


def constrained_equals_base() -> None:
    texts_equal_base(("grammar", "json", "grammar, drawn", "grammar and more"), pattern=(ALL, 1, 2))


def stop_inside_a_run_equals_base() -> None:
    """C01: the stop is the third token of a run of five."""
    text = test_lossless.base(PROMPT, greedy_params(20))[0]
    llm = engine_with(ScriptedDrafter([PROMPT + text]), test_lossless.target())
    params = greedy_params(20, 4, stop_token_ids=[text[2]])
    test_lossless.check_equal_to_base(llm, [(PROMPT, params)])


def preempted_equals_base() -> None:
    llm = engine_with(ScriptedDrafter(pattern=(1, 0)), test_lossless.target(), kv_cache_bytes=8 * BLOCK_SIZE * 512)
    jobs = [(prompt, greedy_params(40, 2)) for prompt in test_lossless.PROMPTS.values()]
    test_lossless.check_equal_to_base(llm, jobs)
    assert llm.engine.scheduler.num_preemptions > 0


def family_equals_transformers(family: str) -> None:
    model = tiny_family(family)
    prompt = [5, 9, 17, 9, 17, 33, 40, 41, 42, 43, 44, 9, 17]
    wanted = tuple(greedy(model, prompt, 12))
    with engine_with(ScriptedDrafter([(*prompt, *wanted)], vocab_size=96), model, tokenizer=None) as llm:
        got = llm.generate(prompt_token_ids=prompt, sampling_params=greedy_params(12, 3))[0].token_ids
    assert got == wanted


def lookup_is_right_on_a_cycle() -> None:
    """On a text that repeats itself, every guess of lookup is what comes next."""
    cycle = [7, 8, 9, 10, 11]
    rows = _draft_rows(cycle * 3)
    made = NGramDrafter(3, 1).propose(rows, 5)
    assert made.tokens[0, : int(made.lengths)].tolist() == cycle[: int(made.lengths)]
    assert int(made.lengths) == 5


def _draft_rows(tokens: list[int]) -> Any:
    from outrider.draft.drafter import DraftRows

    return DraftRows(
        (0,), torch.zeros(1).long(), torch.tensor([tokens]),
        torch.tensor([len(tokens)]), (len(tokens),), torch.zeros(1, 4).long(), None,
        test_sampling.rules_of(SamplingParams()), False,
    )  # fmt: skip


def q_is_what_was_drawn_from() -> None:
    """F02: q of the draft sums to 1 over exactly its sampling support, and every guess lies in it."""
    llm = test_rollback.with_draft("noisy", verification="rejection")
    drafter, seen = llm.engine.drafter, []
    assert drafter is not None
    propose = drafter.propose

    def watched(rows: Any, num_tokens: int) -> Proposal:
        seen.append(propose(rows, num_tokens))
        return seen[-1]

    drafter.propose = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.7, top_k=3, seed=1, max_tokens=12, speculation=3, ignore_eos=True)
    llm.generate(prompt_token_ids=list(PROMPT), sampling_params=params)
    for one in seen:
        assert one.probs is not None
        torch.testing.assert_close(one.probs.sum(-1), torch.ones(one.tokens.shape))
        assert int((one.probs > 0).sum(-1).max()) <= 3
        assert float(one.probs.gather(-1, one.tokens[..., None]).min()) > 0


def draft_of_the_target_is_always_right() -> None:
    for speculation in (1, 3):
        test_rollback.check_draft_accepts_exactly_what_it_must("same", speculation, 60)


def noisy_draft_is_right_where_it_must() -> None:
    test_rollback.check_draft_accepts_exactly_what_it_must("noisy", 3, 60)


def caches_equal_a_fresh_start() -> None:
    llm = engine_with(ScriptedDrafter(test_rollback.texts(50), pattern=(0, 2)), test_lossless.target())
    test_rollback.check_caches_equal_a_fresh_start(llm, greedy_params(20, 4), every=1)


def nothing_behind_a_length_is_read() -> None:
    llm = engine_with(ScriptedDrafter(test_rollback.texts(30), pattern=(0, 3)), test_lossless.target())
    test_rollback.check_nothing_behind_a_length_is_read(llm, 4)


def acceptance_counts_match_the_script() -> None:
    """Q01: one of four guesses is right in every round, and the books say so."""
    llm = engine_with(ScriptedDrafter(test_rollback.texts(30), pattern=(1,)), test_lossless.target())
    made = llm.generate(prompt_token_ids=list(test_rollback.PROMPTS[1]), sampling_params=greedy_params(20, 4))[0]
    assert made.stats.rounds == 10
    assert made.stats.accepted == 10
    assert made.prompt_token_ids + made.token_ids == test_rollback.texts(30)[1][:25]


def rejection_is_exact() -> None:
    test_verify.check_exact_in_distribution("rejection", "dense", 3, 2, torch.float64)


def block_is_exact() -> None:
    test_verify.check_exact_in_distribution("block", "dense", 3, 2, torch.float64)


def drawn_joint(verification: Verification) -> None:
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.8)
    test_verify.check_joint_of_two_tokens(verification, params, "sampled")


def greedy_ignores_ratios() -> None:
    test_verify.test_greedy_takes_the_likeliest_token_whatever_the_ratio_of_raw_probabilities(Verification.REJECTION)


# --- the faults


def raw_draft_probabilities(patch: Patch) -> None:
    patch.setattr(chain_module, "distribution", lambda logits, rules, prefix: logits.softmax(-1))


def residual_is_the_target_itself(patch: Patch) -> None:
    patch.setattr(rejection_module, "residual", lambda p, q, scale=1.0: p)


def residual_is_not_renormalised(patch: Patch) -> None:
    patch.setattr(rejection_module, "residual", lambda p, q, scale=1.0: (scale * p - q).clamp(min=0))


def block_residual_forgets_the_weight(patch: Patch) -> None:
    right = rejection_module.residual
    patch.setattr(rejection_module, "residual", lambda p, q, scale=1.0: right(p, q))


def acceptance_forgets_q(patch: Patch) -> None:
    patch.setattr(rejection_module, "accept_probability", lambda p, q, tokens: p.gather(-1, tokens[..., None])[..., 0])


def bonus_from_the_row_before(patch: Patch) -> None:
    right = rejection_module._committed

    def wrong(proposal: Proposal, accepted: torch.Tensor, rest: torch.Tensor, *others: Any) -> Acceptance:
        return right(proposal, accepted, torch.cat([rest[:, :1], rest[:, :-1]], 1), *others)

    patch.setattr(rejection_module, "_committed", wrong)


def coupled_bonus_from_the_row_before(patch: Patch) -> None:
    def wrong(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
        made = coupled_module.verify_coupled(proposal, choice)
        at = made.num_accepted[:, None]
        return replace(made, tokens=choice.scatter(1, at, choice.gather(1, (at - 1).clamp(min=0))))

    patch.setattr(round_module, "verify_coupled", wrong)


def accepted_count_one_more(patch: Patch) -> None:
    def wrong(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
        made = coupled_module.verify_coupled(proposal, choice)
        guesses = torch.cat([proposal.tokens, choice[:, -1:]], 1)
        return Acceptance(guesses, (made.num_accepted + 1).minimum(proposal.lengths))

    patch.setattr(round_module, "verify_coupled", wrong)


def accepted_count_one_less(patch: Patch) -> None:
    def wrong(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
        made = coupled_module.verify_coupled(proposal, choice)
        return replace(made, num_accepted=(made.num_accepted - 1).clamp(min=0))

    patch.setattr(round_module, "verify_coupled", wrong)


def walk_ignores_lengths(patch: Patch) -> None:
    def wrong(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
        return Acceptance(choice, (proposal.tokens == choice[:, :-1]).long().cumprod(1).sum(1))

    patch.setattr(coupled_module, "verify_coupled", wrong)


def agreement_after_a_difference_counts(patch: Patch) -> None:
    def wrong(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
        guesses = torch.cat([proposal.tokens, choice[:, -1:]], 1)
        agrees = (proposal.tokens == choice[:, :-1]) & proposal.within()
        return Acceptance(guesses, agrees.long().sum(1))

    patch.setattr(round_module, "verify_coupled", wrong)
    patch.setattr(coupled_module, "verify_coupled", wrong)


def penalties_stand_still_along_the_draft(patch: Patch) -> None:
    right = choose_module._counts

    def wrong(rules: Rules, prefix: Prefix, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps = prefix.ends.shape[1]
        counts, seen = right(rules, Prefix(prefix.tokens, prefix.ends[:, :1]), vocab_size)
        return counts.expand(-1, steps, -1), seen.expand(-1, steps, -1)

    patch.setattr(choose_module, "_counts", wrong)


def rules_apply_to_the_last_position_only(patch: Patch) -> None:
    right = choose_module.shaped

    def wrong(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
        return torch.cat([logits[:, :-1], right(logits, rules, prefix)[:, -1:]], 1)

    patch.setattr(choose_module, "shaped", wrong)


def min_tokens_is_counted_by_round(patch: Patch) -> None:
    right = choose_module.shaped

    def wrong(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
        if rules.flags.held:
            rules = replace(rules, prompt_lengths=prefix.ends[:, 0] - 1)
        return right(logits, rules, prefix)

    patch.setattr(choose_module, "shaped", wrong)


def greedy_rows_keep_their_probabilities(patch: Patch) -> None:
    def wrong(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
        return logits.softmax(-1)

    patch.setattr(round_module, "distribution", wrong)


def seed_is_ignored(patch: Patch) -> None:
    patch.setattr(rules_module, "mixed_seed", lambda seed, sample=0: 42)


def noise_counts_from_the_rounds_begin(patch: Patch) -> None:
    right = choose_module.gumbel
    patch.setattr(
        choose_module, "gumbel",
        lambda seeds, positions, purpose, tokens: right(seeds, positions - positions[:, :1], purpose, tokens),
    )  # fmt: skip


def purposes_share_their_noise(patch: Patch) -> None:
    from outrider.sampling import random as random_module

    patch.setattr(random_module, "_keys", functools.partial(_keys_without_purpose, random_module))


def _keys_without_purpose(module: Any, seeds: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    return module._mix(module._mix(seeds[:, None] + positions * 4) + module.GAMMA)


def stop_is_looked_for_at_the_runs_end_only(patch: Patch) -> None:
    right = engine_module.Engine._append

    def wrong(self: Any, sequence: Any, tokens: list[int], accepted: int, drafted: int, now: float) -> int:
        ends = sequence.request.end_ids
        object.__setattr__(sequence.request, "end_ids", frozenset())
        right(self, sequence, [*tokens[:accepted], 0], accepted - 1, drafted, now)
        object.__setattr__(sequence.request, "end_ids", ends)
        return accepted + right(self, sequence, tokens[accepted:], 0, 0, now) if not sequence.finished else accepted

    patch.setattr(engine_module.Engine, "_append", wrong)


def _shift_cache(cache: Any, blocks: list[int], position: int) -> None:
    """Keep a refused guess's keys and values where the last accepted token's belong: a rollback one short."""

    def slot(place: int) -> int:
        return blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE

    for pool in (*cache.keys, *cache.values):
        pool[slot(position)] = pool[slot(position + 1)]


def target_cache_is_one_off_after_a_rejection(patch: Patch) -> None:
    right = engine_module.Engine._collect

    def wrong(self: Any, flight: Any) -> None:
        before = [(list(one.blocks), len(one)) for one in flight.sequences]
        right(self, flight)
        packed, _ = flight.readback.rows()
        for (blocks, length), (*_, accepted, drafted, _) in zip(before, packed, strict=True):
            if accepted < drafted and length + accepted < len(blocks) * BLOCK_SIZE:
                _shift_cache(self.runner.cache, blocks, length + accepted - 1)

    patch.setattr(engine_module.Engine, "_collect", wrong)


def draft_cache_is_one_short_after_full_acceptance(patch: Patch) -> None:
    """B01, B03: the chain feeds the newest token alone, and the last accepted guess is never fed."""

    def commit(self: Any, slots: Any, lengths: Any, accepted: Any) -> None:
        for slot, length, right in zip(slots, lengths, accepted, strict=True):
            self._cached[slot] = length + right

    patch.setattr(draft_module, "REFED", 1)
    patch.setattr(DraftModelDrafter, "commit", commit)


def draft_counts_refused_guesses_as_cached(patch: Patch) -> None:
    """The draft takes its whole chain for right: what was refused stays in its cache."""

    def commit(self: Any, slots: Any, lengths: Any, accepted: Any) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self._cached[slot] = length + 3

    right = DraftModelDrafter.propose

    def propose(self: Any, rows: Any, num_tokens: int) -> Proposal:
        for slot, length, table in zip(rows.slots, rows.host_lengths, rows.tables.tolist(), strict=True):
            if self._cached.get(slot, 0) > length - 1:  # one entry was left over from the last chain
                _shift_cache(self.runner.cache, table, length - 3)
        return right(self, rows, num_tokens)

    patch.setattr(DraftModelDrafter, "commit", commit)
    patch.setattr(DraftModelDrafter, "propose", propose)


def draft_draws_with_noise_of_its_own(patch: Patch) -> None:
    right = chain_module.choose
    patch.setattr(
        chain_module, "choose",
        lambda logits, rules, prefix, purpose: right(logits, rules, Prefix(prefix.tokens, prefix.ends + 1), purpose),
    )  # fmt: skip


def sampled_draft_of_the_target_is_always_right() -> None:
    test_rollback.test_a_sampled_text_drafted_by_the_target_itself_is_right_throughout()


def lookup_copies_from_one_place_too_far(patch: Patch) -> None:
    right = NGramDrafter.propose

    def wrong(self: Any, rows: Any, num_tokens: int) -> Proposal:
        made = right(self, rows, num_tokens)
        return replace(made, tokens=made.tokens.roll(-1, 1))

    patch.setattr(NGramDrafter, "propose", wrong)


def _mask_with(patch: Patch, seen_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    def mask(self: Any, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor:
        place, query = torch.arange(self.context), self.positions[..., None]
        seen = seen_by(place, query)
        if window is not None:
            seen &= place > query - window
        rows, steps, length = seen.shape
        hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return hidden[:, None, None].expand(rows, 1, group, steps, length).reshape(rows, 1, group * steps, length)

    patch.setattr(Step, "_mask", mask)


def mask_sees_one_too_many(patch: Patch) -> None:
    _mask_with(patch, lambda place, query: place <= query + 1)


def mask_sees_one_too_few(patch: Patch) -> None:
    _mask_with(patch, lambda place, query: (place < query) | ((place == 0) & (query == 0)))


def mask_as_it_is(patch: Patch) -> None:
    _mask_with(patch, lambda place, query: place <= query)


def window_is_ignored(patch: Patch) -> None:
    right = Step.mask
    patch.setattr(Step, "mask", lambda self, window, group, dtype: right(self, None, group, dtype))


def soft_cap_is_ignored(patch: Patch) -> None:
    right = attention_module._scored
    patch.setattr(
        attention_module, "_scored",
        lambda query, keys, values, mask, scale, softcap: right(query, keys, values, mask, scale, None),
    )  # fmt: skip


def preempted_rows_count_as_cached(patch: Patch) -> None:
    right = Scheduler._release

    def wrong(self: Any, sequence: Any) -> None:
        cached = sequence.cached
        right(self, sequence)
        sequence.cached = cached

    patch.setattr(Scheduler, "_release", wrong)


def penalty_state_survives_a_rejection(patch: Patch) -> None:
    """What lies behind a row's end (refused guesses of earlier rounds) is counted as if it had been generated."""
    right = choose_module._counts

    def wrong(rules: Rules, prefix: Prefix, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts, seen = right(rules, prefix, vocab_size)
        after = torch.zeros_like(counts[:, 0]).scatter_add_(1, prefix.tokens[:, -1:], torch.ones(len(counts), 1))
        return counts + after[:, None], seen

    patch.setattr(choose_module, "_counts", wrong)


def _masks_with(patch: Patch, change: Callable[[torch.Tensor], None]) -> None:
    right = Constraint.masks

    def wrong(self: Any, guesses: Any, parents: Any) -> torch.Tensor:
        made = right(self, guesses, parents)
        change(made)
        return made

    patch.setattr(Constraint, "masks", wrong)


def grammars_mask_the_first_place_only(patch: Patch) -> None:
    _masks_with(patch, lambda made: made[1:].fill_(-1))


def grammars_stand_still_along_the_draft(patch: Patch) -> None:
    _masks_with(patch, lambda made: made.copy_(made[:1].expand_as(made).clone()))


def grammars_are_one_place_late(patch: Patch) -> None:
    _masks_with(patch, lambda made: made[1:].copy_(made[:-1].clone()))


class _NoWayBack:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def rollback(self, count: int) -> bool:
        return True


def grammars_move_by_guesses(patch: Patch) -> None:
    right = CompiledGrammar.matcher
    patch.setattr(CompiledGrammar, "matcher", lambda self: _NoWayBack(right(self)))


def grammars_end_before_min_tokens(patch: Patch) -> None:
    right = choose_module.shaped

    def wrong(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
        return right(logits, replace(rules, min_tokens=rules.min_tokens * 0), prefix)

    patch.setattr(choose_module, "shaped", wrong)
    patch.setattr(Constraint, "_can_close", lambda self, count: bool(self._closing))


def the_grammars_end_holds_no_tokens_back() -> None:
    test_grammar.test_min_tokens_hold_the_end_back_only_while_the_grammar_can_go_on()


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (raw_draft_probabilities, q_is_what_was_drawn_from),
    (residual_is_the_target_itself, rejection_is_exact),
    (residual_is_the_target_itself, functools.partial(drawn_joint, Verification.REJECTION)),
    (residual_is_not_renormalised, rejection_is_exact),
    (residual_is_not_renormalised, block_is_exact),
    (block_residual_forgets_the_weight, block_is_exact),
    (acceptance_forgets_q, rejection_is_exact),
    (bonus_from_the_row_before, functools.partial(drawn_joint, Verification.BLOCK)),
    (coupled_bonus_from_the_row_before, greedy_equals_base),
    (accepted_count_one_more, greedy_equals_base),
    (accepted_count_one_less, acceptance_counts_match_the_script),
    (walk_ignores_lengths, test_verify.check_coupled_walk),
    (agreement_after_a_difference_counts, test_verify.check_coupled_walk),
    (penalties_stand_still_along_the_draft, test_sampling.check_penalties_follow_each_positions_own_prefix),
    (penalties_stand_still_along_the_draft, penalised_equals_base),
    (penalty_state_survives_a_rejection, test_sampling.check_penalties_follow_each_positions_own_prefix),
    (rules_apply_to_the_last_position_only, biased_equals_base),
    (min_tokens_is_counted_by_round, min_tokens_equals_base),
    (greedy_rows_keep_their_probabilities, greedy_ignores_ratios),
    (seed_is_ignored, test_lossless.check_seed_matters),
    (noise_counts_from_the_rounds_begin, sampled_equals_base),
    (purposes_share_their_noise, test_sampling.check_noise_is_fixed_by_seed_position_and_purpose),
    (stop_is_looked_for_at_the_runs_end_only, stop_inside_a_run_equals_base),
    (target_cache_is_one_off_after_a_rejection, caches_equal_a_fresh_start),
    (draft_cache_is_one_short_after_full_acceptance, draft_of_the_target_is_always_right),
    (draft_counts_refused_guesses_as_cached, noisy_draft_is_right_where_it_must),
    (draft_draws_with_noise_of_its_own, sampled_draft_of_the_target_is_always_right),
    (lookup_copies_from_one_place_too_far, lookup_is_right_on_a_cycle),
    (mask_sees_one_too_many, greedy_equals_base),
    (mask_sees_one_too_few, caches_equal_a_fresh_start),
    (window_is_ignored, functools.partial(family_equals_transformers, "mistral")),
    (soft_cap_is_ignored, functools.partial(family_equals_transformers, "gemma2")),
    (preempted_rows_count_as_cached, preempted_equals_base),
    (grammars_mask_the_first_place_only, constrained_equals_base),
    (grammars_stand_still_along_the_draft, constrained_equals_base),
    (grammars_are_one_place_late, constrained_equals_base),
    (grammars_move_by_guesses, constrained_equals_base),
    (grammars_end_before_min_tokens, the_grammars_end_holds_no_tokens_back),
]


def name_of(one: Any) -> str:
    if isinstance(one, functools.partial):
        return f"{one.func.__name__}({', '.join(map(str, one.args))})"
    return str(getattr(one, "__name__", one))


@functools.cache
def passes_unharmed(check: Callable[[], None]) -> bool:
    """Run a check without any fault, once (this also fixes BASE, before a fault could touch it)."""
    check()
    return True


@pytest.fixture(autouse=True)
def _caches_begin_as_noise(monkeypatch: Patch) -> None:
    """Fresh memory may hold what an earlier engine with the same text left there: a missing entry would go unseen."""
    make = KVCache.__init__

    def noisy(self: KVCache, *arguments: Any) -> None:
        make(self, *arguments)
        for pool in (*self.keys, *self.values):
            pool[BLOCK_SIZE:].normal_()

    monkeypatch.setattr(KVCache, "__init__", noisy)


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=name_of)
def test_a_fault_is_caught(mutant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch) -> None:
    assert passes_unharmed(check)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_a_patch_that_changes_nothing_is_not_caught(monkeypatch: Patch) -> None:
    """The patches' own machinery does no harm: the mask rewritten as it is passes."""
    mask_as_it_is(monkeypatch)
    caches_equal_a_fresh_start()
    greedy_equals_base()
