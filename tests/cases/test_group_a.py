"""Group A: greedy text never differs from the plain target's."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, InvalidRequestError
from outrider.proposal import Proposal
from outrider.sampling.rules import Prefix, RuleTable
from tests.cases_support import GREEDY, PROMPTS, base, draft, engine, guessed, ids, lookup, opened, target, truth, words
from tests.tiny import byte_tokenizer, greedy, save, tiny_draft, tiny_target


def test_BASE_is_what_the_model_says_by_itself() -> None:
    """The oracle of all cases agrees with a recomputation from scratch, without any cache of ours."""
    for prompt in PROMPTS[:3]:
        plain = target_alone(prompt, 25)
        assert truth(prompt, 25) == plain


def target_alone(prompt: list[int], num_tokens: int) -> list[int]:
    model = copy.deepcopy(target())
    model.set_attn_implementation("eager")
    return greedy(model, prompt, num_tokens)


def test_A01_a_prompt_of_one_token_gives_the_plain_text() -> None:
    """EQ for twenty one-token prompts with D~ at k=5; an empty prompt is refused alike in both modes."""
    prompts = [[token] for token in range(3, 243, 12)]
    assert ids(guessed(prompts, draft("noisy"), 5, max_tokens=20)) == ids(base(prompts, max_tokens=20))
    for mode in ({"speculation": "off"}, {"speculative_model": draft("noisy"), "num_speculative_tokens": 5}):
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            engine().generate([[]], GREEDY.but(**mode))


@pytest.mark.parametrize("exact", [False, True])
def test_A03_a_near_tie_at_the_first_position_falls_the_same_way(exact: bool) -> None:
    """With two head rows 1e-6 apart the first token is the same in both modes (fast: or a tie by the logits)."""
    for length in (2, 17, 64):
        prompt = list((b"Some words before a near tie, long enough for all lengths there are" * 2)[:length])
        model = tiny_target(seed=5)
        best = greedy(model, prompt, 1)[0]
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head[(best + 7) % 250] = head[best] * (1 + 1e-6)
        llm = opened(model, exact=exact, max_model_len=96, max_num_seqs=1, num_speculative_tokens=4)
        plain = base([prompt], llm, max_tokens=1 if not exact else 4)[0]
        spoken = guessed([prompt], lookup(1, 3), 4, llm, max_tokens=8)[0]
        same = plain.token_ids[0] == spoken.token_ids[0]
        assert same or (not exact and {plain.token_ids[0], spoken.token_ids[0]} == {best, (best + 7) % 250})


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 16])
def test_A04_the_text_does_not_depend_on_k(k: int) -> None:
    """EQ with D~ for every draft length."""
    assert ids(guessed(PROMPTS, draft("noisy"), k, max_tokens=28)) == [truth(prompt, 28) for prompt in PROMPTS]


def test_A06_lookup_on_repetitive_prompts_changes_nothing() -> None:
    """EQ on a phrase repeated twelve times, also beside rows that never find a match."""
    prompts = [list(b"xyz" * 12), list(b"abcdefgh"), list(b"no! " * 12), [7]]
    done = guessed(prompts, lookup(2, 5), 4, max_tokens=60)
    assert ids(done) == ids(base(prompts, max_tokens=60))


def test_A07_half_precision_is_exact_in_exact_mode_and_within_ties_in_fast_mode() -> None:
    """bf16: exact mode is EQ; fast mode may leave BASE only where BASE's best two lie close together."""
    model = tiny_target().to(torch.bfloat16)
    drafting = LLM(model=tiny_draft(tiny_target(), "noisy").to(torch.bfloat16), tokenizer=words(), max_num_seqs=1)
    prompts = PROMPTS[:3]
    exact = opened(model, exact=True, max_num_seqs=3, num_speculative_tokens=3)
    assert ids(guessed(prompts, drafting, 3, exact, max_tokens=40)) == ids(base(prompts, exact, max_tokens=40))
    fast = opened(model, max_num_seqs=3)
    plain = base(prompts, fast, max_tokens=60, logprobs=2)
    for one, other in zip(plain, guessed(prompts, drafting, 3, fast, max_tokens=60), strict=True):
        split = next((at for at in range(60) if one.token_ids[at] != other.token_ids[at]), None)
        if split is not None:
            first, second = sorted(one.logprobs[split].top.values(), reverse=True)
            assert first - second < 0.3, f"diverged at {split} where the gap was {first - second}"


def test_A08_a_rounded_copy_as_draft_changes_speed_only() -> None:
    """EQ with drafts that are T on an int8 and on an int4 grid; the finer one is agreed with more often."""
    rates = []
    for levels in (127, 7):
        rounded = tiny_draft(target(), "same")
        with torch.no_grad():
            for weight in rounded.parameters():
                if weight.ndim == 2:
                    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / levels
                    weight.copy_((weight / scale).round() * scale)
        done = guessed(PROMPTS[:4], LLM(model=rounded, tokenizer=words(), max_num_seqs=1), 4)
        assert ids(done) == [truth(prompt, 40) for prompt in PROMPTS[:4]]
        rates.append(sum(one.stats.accepted for one in done) / sum(one.stats.drafted for one in done))
    assert rates[0] > rates[1]


def test_A11_greedy_wins_over_every_filter() -> None:
    """Temperature 0 with top_p, top_k and min_p in all combinations is plain greedy."""
    params = [
        GREEDY.but(top_p=top_p, top_k=top_k, min_p=min_p)
        for top_p, top_k, min_p in product((1.0, 0.5), (0, 3), (0.0, 0.2))
    ]
    for done in (base([PROMPTS[0]] * 8, params=params), guessed([PROMPTS[0]] * 8, draft("noisy"), 4, params=params)):
        assert ids(done) == [truth(PROMPTS[0], 40)] * 8


def with_bos(tokenizer: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("adds_bos", [False, True])
def test_A13_the_prompt_is_tokenized_alike_in_every_mode(adds_bos: bool) -> None:
    """prompt_token_ids with a special token in the text are the tokenizer's own, speculation on or off."""
    tokenizer = with_bos(byte_tokenizer()) if adds_bos else byte_tokenizer()
    prompt = "Hi</s> there <s>you"
    wanted = tuple(tokenizer(prompt).input_ids)
    assert (tokenizer.eos_token_id in wanted) and (wanted[0] == tokenizer.bos_token_id) == adds_bos
    settings: list[dict[str, Any]] = [{}, {"method": "ngram"}, {"speculative_model": draft("noisy")}]
    for setting in settings:
        with_it = LLM(model=target(), tokenizer=tokenizer, max_model_len=64, max_num_seqs=1, **setting)
        for speculation in ("auto", "off"):
            params = GREEDY.but(max_tokens=1, speculation=speculation)
            assert with_it.generate(prompt, params)[0].prompt_token_ids == wanted


@pytest.mark.parametrize("adds_bos", [False, True])
def test_A13_the_command_line_tokenizes_the_prompt_as_the_library_does(adds_bos: bool, tmp_path: Path) -> None:
    """Through `outrider generate --json`, speculation on and off, the prompt has the same ids."""
    pytest.importorskip("outrider.cli")
    from typer.testing import CliRunner

    from outrider.cli import app

    tokenizer = with_bos(byte_tokenizer()) if adds_bos else byte_tokenizer()
    folder = save(tiny_target(), tokenizer, tmp_path)
    prompt = "Hi</s> there <s>you"
    wanted = tokenizer(prompt).input_ids
    for method in ("none", "ngram"):
        asked = ["generate", prompt, "--model", str(folder), "--method", method, "--json", "--prompt-logprobs", "0"]
        result = CliRunner().invoke(app, [*asked, "--raw", "--max-tokens", "2", "--max-model-len", "64"])
        assert result.exit_code == 0, result.output
        reported = json.loads(result.stdout.strip().splitlines()[-1])["prompt_logprobs"]
        assert reported[0] is None and [one["token_id"] for one in reported[1:]] == wanted[1:]


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block", "typical"])
def test_A14_greedy_never_accepts_what_is_not_the_argmax(verification: str) -> None:
    """Target 0.5/0.3/0.2, draft proposes the 0.3 token with q=0.2: at T=0 a thousand seeds all give the argmax."""
    from outrider.config import Verification
    from outrider.engine.round import judge

    seeds = 1000
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, GREEDY.but(seed=0), prompt_length=1)
    rules = table.select([0] * seeds)
    object.__setattr__(rules, "seeds", torch.arange(seeds) * 7919)
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(seeds, 2, 3)
    q = torch.tensor([0.7, 0.2, 0.1]).expand(seeds, 1, 3)
    proposal = Proposal(torch.ones(seeds, 1, dtype=torch.long), torch.ones(seeds, dtype=torch.long), q)
    prefix = Prefix(torch.zeros(seeds, 3, dtype=torch.long), torch.tensor([[1, 2]]).expand(seeds, 2))
    judged = judge(
        Verification(verification),
        proposal,
        logits,
        rules,
        prefix,
    )
    assert judged.num_accepted.eq(0).all() and judged.tokens[:, 0].eq(0).all()
