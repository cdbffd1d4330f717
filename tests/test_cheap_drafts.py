"""A cheaper draft can cost guesses, never a token: a shortened head, rounded weights, or no memory for it at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import CapacityError
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

PROMPTS = [[65], list(b"Hello"), list(b"abcabcabd" * 4), list(range(60, 77))]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.5, "logit_bias": {70: 1.5}},
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 20, "logprobs": 1},
]
CHEAPER: dict[str, dict[str, Any]] = {
    "a few ids": {"draft_vocab_size": 40},
    "most ids": {"draft_vocab_size": 250},
    "int8": {"draft_quantization": "int8"},
    "int4 and short": {"draft_quantization": "int4", "draft_vocab_size": 270},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root, target = tmp_path_factory.mktemp("pair"), tiny_target()
    draft = tiny_draft(target, "noisy")
    return str(save(target, byte_tokenizer(), root / "target")), str(save(draft, byte_tokenizer(), root / "draft"))


def texts(llm: LLM, speculation: object, many: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    params = [SamplingParams(max_tokens=24, ignore_eos=True, speculation=speculation, **one) for one in many]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.filterwarnings("ignore:draft_vocab_size")
@pytest.mark.parametrize("how", CHEAPER)
def test_a_cheaper_draft_changes_no_token_whatever_the_rules(pair: tuple[str, str], how: str) -> None:
    with LLM(*pair, dtype="float32", device="cpu", **CHEAPER[how]) as llm:
        assert texts(llm, 5, SETTINGS) == texts(llm, "off", SETTINGS)
        assert llm.engine.figures.drafted > 0
        assert llm.engine.figures.accepted > 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("how", ["most ids", "int8"])
def test_it_changes_no_greedy_token_under_other_verifiers(pair: tuple[str, str], verification: str, how: str) -> None:
    greedy = [{"temperature": 0}] * len(PROMPTS)
    with LLM(*pair, dtype="float32", device="cpu", verification=verification, **CHEAPER[how]) as llm:
        assert texts(llm, 5, greedy) == texts(llm, "off", greedy)
        assert llm.engine.figures.accepted > 0


def test_what_a_shortened_draft_draws_from_is_a_distribution_over_its_list(pair: tuple[str, str]) -> None:
    """Rejection is exact for any q, if q is what was drawn from: it sums to 1 on the list, and is 0 elsewhere."""
    with LLM(*pair, dtype="float32", device="cpu", verification="rejection", draft_vocab_size=250) as llm:
        drafter: Any = llm.engine.drafter
        propose, seen = drafter.propose, []
        drafter.propose = lambda rows, num_tokens: seen.append(propose(rows, num_tokens)) or seen[-1]
        texts(llm, 4, [{"temperature": 1.0, "seed": place} for place in range(len(PROMPTS))])
    outside = torch.ones(320, dtype=torch.bool)
    outside[drafter._shortlist] = False
    for proposal in seen:
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(proposal.tokens.shape))
        assert not proposal.probs[..., outside].any()
        assert (proposal.probs.gather(-1, proposal.tokens[..., None]) > 0).all()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), CapacityError("it takes 9 GiB")])
def test_a_draft_without_room_costs_its_speed_alone(
    pair: tuple[str, str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("outrider.draft_models.load_model", run_out)
    with pytest.warns(UserWarning, match="no speculation: the draft could not be used"):
        llm = LLM(*pair, dtype="float32", device="cpu")
    with llm:
        assert llm.engine.drafter is None
        assert len(texts(llm, "auto", SETTINGS)[0]) == 24


def test_a_draft_that_runs_out_of_memory_in_a_round_costs_its_guesses_alone(pair: tuple[str, str]) -> None:
    with LLM(*pair, dtype="float32", device="cpu") as llm:
        wanted = texts(llm, "off", SETTINGS)
        drafter: Any = llm.engine.drafter

        def run_out(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        drafter.runner.forward = run_out
        assert texts(llm, 5, SETTINGS) == wanted
        assert llm.engine.speculator.num_failures == 3  # then it is switched off
