"""The target's own layers draft on its own cache: never a changed token, and found by search where they agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.early_exit import best_exit, best_skips, kept_layers, own_texts
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.model.load import LoadedModel
from outrider.model.runner import TorchRunner
from outrider.model.subset import LayerSubsetRunner
from outrider.sampling.params import SamplingParams
from tests.scripted import engine_with, greedy_params
from tests.tiny import FAMILIES, byte_tokenizer, greedy, tiny_family, tiny_target

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]


def deep_target(num_layers: int = 6, idle: tuple[int, ...] = (3, 4, 5)) -> Any:
    """A target whose `idle` layers add next to nothing: the others alone say what it will say."""
    model = tiny_target(num_hidden_layers=num_layers)
    with torch.no_grad():
        for index in idle:
            model.model.layers[index].self_attn.o_proj.weight.mul_(1e-5)
            model.model.layers[index].mlp.down_proj.weight.mul_(1e-5)
    return model


class SelfDrafting(LLM):
    """An LLM that drafts with some of its target's layers."""

    keep: tuple[int, ...] = ()

    def _drafter(self, *_: object) -> DraftModelDrafter:
        runner = self._owned[0]
        size = runner.vocab_size
        return DraftModelDrafter(LayerSubsetRunner(runner, self.keep), size, size, "early_exit", own_cache=False)


def self_drafting(model: Any, keep: tuple[int, ...], **settings: Any) -> LLM:
    kind = type("Kept", (SelfDrafting,), {"keep": keep})
    settings = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "method": "ngram"} | settings
    return kind(model, **settings)


@pytest.mark.parametrize("keep", [(0, 1, 2), (0,), (0, 2, 5), (1, 3)])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_own_layers_change_no_token(keep: tuple[int, ...], verification: str) -> None:
    with self_drafting(deep_target(), keep, verification=verification, max_num_seqs=4) as llm:
        settings = [{"temperature": 0}]
        if verification == "coupled":
            settings += [{"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "top_p": 0.8, "presence_penalty": 0.5}]
        for one in settings:
            params = SamplingParams(max_tokens=50, ignore_eos=True, seed=one.pop("seed", 5), **one)
            wanted = [out.token_ids for out in llm.generate(PROMPTS, params.but(speculation="off"))]
            assert [out.token_ids for out in llm.generate(PROMPTS, params.but(speculation=4))] == wanted
        assert llm.engine.figures.drafted > 0


def test_layers_that_say_it_all_are_always_right() -> None:
    """B: an identical draft is accepted at every position, for 300 tokens."""
    with self_drafting(deep_target(), (0, 1, 2), max_num_seqs=2) as llm:
        output = llm.generate([[65, 66]], greedy_params(300, speculation=5))[0]
        assert output.stats.acceptance_rate == 1.0
        assert output.stats.rounds == 50


def test_layers_in_the_middle_may_be_skipped() -> None:
    with self_drafting(deep_target(idle=(1, 3)), (0, 2, 4, 5), max_num_seqs=2) as llm:
        assert llm.generate([[65, 66]], greedy_params(120, speculation=5))[0].stats.acceptance_rate == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_draft_with_its_own_layers(family: str) -> None:
    model, prompt = tiny_family(family), [5, 9, 17, 9, 17, 33, 40, 41]
    wanted = tuple(greedy(model, prompt, 20))
    with self_drafting(model, (0,), tokenizer=None, max_num_seqs=2) as llm:
        output = llm.generate(prompt_token_ids=prompt, sampling_params=greedy_params(20, speculation=3))[0]
        assert output.token_ids == wanted
        assert llm.engine.speculator.num_failures == 0
        assert output.stats.drafted > 0


def runner_of(model: Any) -> TorchRunner:
    with engine_with(None, model) as llm:
        loaded: LoadedModel = llm.loaded
    return TorchRunner(loaded)


def test_the_search_finds_where_the_target_has_made_up_its_mind() -> None:
    runner = runner_of(deep_target())
    texts = own_texts(runner, PROMPTS[:2], 40)
    assert texts[0].tokens[0, 1:].tolist() == list(greedy(deep_target(), [65], 40))
    found = best_exit(runner, texts, 5)
    assert (found.keep, found.agreement) == ((0, 1, 2), 1.0)
    assert found.speedup > 1.3
    runner.close()


def test_the_search_for_skips_finds_idle_layers_anywhere() -> None:
    runner = runner_of(deep_target(idle=(1, 4)))
    found = best_skips(runner, own_texts(runner, PROMPTS[:2], 30), 5)
    assert (found.keep, found.agreement) == ((0, 2, 3, 5), 1.0)
    runner.close()


@pytest.mark.parametrize("exit_layer", [0, 6, -1])
def test_an_exit_that_is_none_is_refused(exit_layer: int) -> None:
    with pytest.raises(ConfigError, match="1 to 5"):
        kept_layers(6, exit_layer, None)


@pytest.mark.parametrize("skips", [(), (6,), (-1,), (0, 1, 2, 3, 4, 5)])
def test_skips_that_leave_or_save_nothing_are_refused(skips: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="skip_layers"):
        kept_layers(6, None, skips)
    assert kept_layers(6, None, [4, 1]) == (0, 2, 3, 5)
