"""What only a card can show. Run with ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

import copy
import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, Grammar, SamplingParams
from outrider.engine.choice import Choice
from outrider.engine.controller import Controller
from outrider.model.kv_cache import TRASH_BLOCK, blocks_for
from tests.scripted import ScriptedDrafter, engine_with
from tests.tiny import FAMILIES, byte_tokenizer, greedy, save, tiny_draft, tiny_family, tiny_target
from tests.ways import WAYS, source_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 4, "presence_penalty": 0.5, "logprobs": 2},
]


def texts(llm: LLM, speculation: object, settings: dict) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=60, ignore_eos=True, speculation=speculation, **settings)
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled", "rules"])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_on_a_card_changes_no_token(settings: dict, exact: bool, method: str) -> None:
    target = tiny_target().cuda()
    draft = tiny_draft(tiny_target(), "noisy").cuda() if method == "draft_model" else None
    with LLM(target, draft, tokenizer=byte_tokenizer(), method=method, exact=exact, max_num_seqs=4) as llm:
        assert texts(llm, 5, settings) == texts(llm, "off", settings)
        assert llm.engine.figures.drafted > 0


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_rows_with_a_grammar_share_a_batch_with_others_on_a_card(exact: bool, method: str) -> None:
    """Their rounds are read first and run eagerly; no token changes, and each text is what its grammar says."""
    pytest.importorskip("llguidance")
    target = tiny_target().cuda()
    draft = tiny_draft(tiny_target(), "noisy").cuda() if method == "draft_model" else None
    grammar = Grammar.regex("[a-m ]{2,9}(:[0-9a-f]{2,6}){1,3}!")
    with LLM(target, draft, tokenizer=byte_tokenizer(), method=method, exact=exact, max_num_seqs=4) as llm:
        for settings in SETTINGS:
            free = SamplingParams(max_tokens=60, ignore_eos=True, **settings)
            rows = [free.but(grammar=grammar), free, free.but(grammar=grammar), free]
            made = [
                [one.outputs[0] for one in llm.generate(PROMPTS, [row.but(speculation=how) for row in rows])]
                for how in ("off", 5)
            ]
            plain, guessed = ([(one.token_ids, one.finish_reason) for one in part] for part in made)
            assert guessed == plain
            assert all(re.fullmatch("[a-m ]{2,9}(:[0-9a-f]{2,6}){1,3}!", made[1][row].text) for row in (0, 2))


def test_a_card_generates_what_transformers_would() -> None:
    target = tiny_target()
    wanted = [tuple(greedy(target, prompt, 60)) for prompt in PROMPTS]
    with LLM(copy.deepcopy(target).cuda(), tokenizer=byte_tokenizer(), method="ngram", max_num_seqs=4) as llm:
        assert texts(llm, 5, {"temperature": 0}) == wanted


@pytest.mark.parametrize(("target_device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_N01_target_and_draft_on_different_devices_work_together(target_device: str, draft_device: str) -> None:
    target = tiny_target()
    draft = tiny_draft(target, "same").to(draft_device)
    with LLM(target.to(target_device), draft, tokenizer=byte_tokenizer(), max_num_seqs=4) as llm:
        for settings in SETTINGS:
            assert texts(llm, 4, settings) == texts(llm, "off", settings)
        assert llm.engine.figures.accepted > 0.8 * llm.engine.figures.drafted > 0


def test_bf16_on_a_card_is_exact_in_exact_mode() -> None:
    target = tiny_target().to(device="cuda", dtype=torch.bfloat16)
    draft = tiny_draft(tiny_target(), "noisy").to(device="cuda", dtype=torch.bfloat16)
    with LLM(target, draft, tokenizer=byte_tokenizer(), exact=True, max_num_seqs=4) as llm:
        for settings in SETTINGS:
            assert texts(llm, 5, settings) == texts(llm, "off", settings)


def saved(target: Any, root: Path) -> tuple[str, str]:
    draft = tiny_draft(target, "noisy")
    return str(save(target, byte_tokenizer(), root / "target")), str(save(draft, byte_tokenizer(), root / "draft"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Target and draft as checkpoints: what Outrider loads itself, it runs on its own kernels."""
    return saved(tiny_target(), tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same with smaller weights: the wide ones pass rounding on, about tenfold a layer, too much for halves."""
    return saved(tiny_target(std=0.15), tmp_path_factory.mktemp("narrow"))


def assert_only_near_ties_part(llm: LLM) -> None:
    """In fast mode a half's rounding may flip a near-tie: the log-probabilities say whether it was one."""
    kind = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "logprobs": 5}
    plain, guessed = (llm.generate(PROMPTS, SamplingParams(speculation=one, **kind)) for one in ("off", 5))
    for mine, theirs in zip(plain, guessed, strict=True):
        pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            top = mine.outputs[0].logprobs[at].top
            assert top[mine.token_ids[at]] - top[theirs.token_ids[at]] < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_loaded_models_run_on_kernels_and_change_no_token(
    folders: tuple[str, str], narrow: tuple[str, str], dtype: str, exact: bool
) -> None:
    with LLM(*(folders if dtype == "float32" else narrow), dtype=dtype, exact=exact, max_num_seqs=4) as llm:
        assert llm.engine.runner.network.device_decoder is not None
        if dtype != "float32" and not exact:
            assert_only_near_ties_part(llm)
        else:
            for settings in SETTINGS:
                plain = texts(llm, "off", settings)
                assert texts(llm, 5, settings) == plain
                if dtype == "float32" and settings == {"temperature": 0}:
                    assert plain == [tuple(greedy(tiny_target(), prompt, 60)) for prompt in PROMPTS]
        assert llm.engine.figures.accepted > 0
        assert llm.engine.graphs.num_captured


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_quantised_draft_changes_speed_alone(narrow: tuple[str, str], kind: str) -> None:
    how = {"dtype": "bfloat16", "draft_quantization": kind, "draft_vocab_size": 200, "max_num_seqs": 4}
    least = 0.05 if kind == "int4" else 0.1  # it feels the rounding: in plain torch the same weights get 0.103
    with LLM(*narrow, **how, exact=True) as llm:
        for settings in SETTINGS:
            assert texts(llm, 5, settings) == texts(llm, "off", settings)
        assert llm.engine.figures.accepted > least * llm.engine.figures.drafted > 0
    with LLM(*narrow, **how) as llm:
        assert_only_near_ties_part(llm)
        assert llm.engine.figures.accepted > least * llm.engine.figures.drafted > 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_other_verifiers_are_captured_too(folders: tuple[str, str], verification: str) -> None:
    with LLM(*folders, dtype="float32", verification=verification, max_num_seqs=4) as llm:
        assert texts(llm, 5, {"temperature": 0}) == texts(llm, "off", {"temperature": 0})
        assert len(texts(llm, 5, {"temperature": 1.0, "seed": 2})[0]) == 60
        assert llm.engine.graphs.num_replays == llm.engine.figures.rounds


def watch_for_waits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it may miss some
        torch.cuda.set_sync_debug_mode("error")


@pytest.mark.parametrize("speculation", ["off", 4], ids=["plain", "speculative"])
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=["greedy", "sampled"])
def test_a_round_is_one_replay_and_nobody_waits(narrow: tuple[str, str], speculation: object, settings: dict) -> None:
    """No copy to the host, no look at a value: torch raises where any operation would make the host wait."""
    with LLM(*narrow, dtype="bfloat16", num_speculative_tokens=4, max_num_seqs=4) as llm:
        texts(llm, speculation, settings)
        params = SamplingParams(max_tokens=60, ignore_eos=True, speculation=speculation, **settings)
        sequences = [llm.intake.sequences(llm.intake.request(prompt, params))[0] for prompt in PROMPTS]
        for sequence in sequences:
            llm.engine.add(sequence)
        llm.engine.step()
        replays, rounds, steps = llm.engine.graphs.num_replays, llm.engine.figures.rounds, 0
        try:
            watch_for_waits()
            while len(sequences[0].output) < 40:
                llm.engine.step()
                steps += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while llm.engine.busy:
            llm.engine.step()
        assert llm.engine.graphs.num_replays - replays == llm.engine.figures.rounds - rounds >= steps > 5


@pytest.mark.parametrize("settings", SETTINGS[:2], ids=["greedy", "sampled"])
def test_texts_come_and_go_and_nobody_waits(narrow: tuple[str, str], settings: dict) -> None:
    """A number assigned to a place on the card waits for the card: whoever came held up the others for a round."""
    with LLM(*narrow, dtype="bfloat16", num_speculative_tokens=4, max_num_seqs=4, enable_prefix_caching=False) as llm:
        texts(llm, 4, settings)
        params = SamplingParams(max_tokens=30, ignore_eos=True, speculation=4, **settings)
        sequences = [llm.intake.sequences(llm.intake.request(prompt, params))[0] for prompt in PROMPTS * 2]
        try:
            watch_for_waits()
            for sequence in sequences:
                llm.engine.add(sequence)
            while llm.engine.busy:
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [len(one.output) for one in sequences] == [30] * len(sequences)


def test_nothing_is_compiled_once_an_engine_stands(narrow: tuple[str, str]) -> None:
    """A compilation in the middle of texts holds everybody up for seconds: whatever a draft must read is foreseen."""
    from triton import knobs

    compiled: list[str] = []
    with LLM(*narrow, dtype="bfloat16", max_num_seqs=8, max_model_len=500) as llm:
        knobs.runtime.jit_cache_hook = lambda **asked: compiled.append(asked["fn"].name)  # says nothing: go on
        try:
            for settings in SETTINGS[:2]:
                for how in ("off", "auto", 5):
                    texts(llm, how, settings)
            for runner, longest in ((llm.engine.runner, 200), (llm.engine.drafter.runner, 400)):
                for rows, width in product((1, 3, 4, 8), (1, 2, 3, 5, 9, 16, 17, 33, 64, 65, 100, 200, longest)):
                    positions = torch.arange(40, 40 + width, device="cuda").repeat(rows, 1)
                    tables = torch.full((rows, blocks_for(500)), TRASH_BLOCK, device="cuda")
                    runner.feed(positions * 0, positions, tables, 40 + width, None)
        finally:
            knobs.runtime.jit_cache_hook = None
    assert compiled == []


@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_a_card_generate_what_transformers_does(family: str) -> None:
    model, prompt = tiny_family(family), [5, 9, 17, 9, 17, 33, 40, 41, 42, 43, 44, 9, 17]
    wanted = tuple(greedy(model, prompt, 24))
    with LLM(model.cuda(), method="ngram", max_num_seqs=4) as llm:
        for speculation in ("off", 4):
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, speculation=speculation)
            assert llm.generate(prompt_token_ids=prompt, sampling_params=params)[0].token_ids == wanted


def test_a_drafter_that_needs_the_host_still_gets_its_rounds(folders: tuple[str, str]) -> None:
    target = tiny_target()
    wanted = [tuple(greedy(target, prompt, 60)) for prompt in PROMPTS]
    drafter = ScriptedDrafter([(*p, *w) for p, w in zip(PROMPTS, wanted, strict=True)], pattern=(3, 0, 1))
    with engine_with(drafter, target.cuda(), device="cuda") as llm:
        assert texts(llm, 4, {"temperature": 0}) == wanted
        assert llm.engine.figures.accepted > 0


def test_prompts_of_several_chunks_and_several_at_once_are_fed_alike(folders: tuple[str, str]) -> None:
    prompts = [[(7 * i + j) % 256 for i in range(200 + 40 * j)] for j in range(4)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, speculation=4)
    wanted = [tuple(greedy(tiny_target(), prompt, 20)) for prompt in prompts]
    for size, rows in ((2048, 4), (2048, 1), (128, 4), (100, 4)):
        with LLM(*folders, dtype="float32", prefill_chunk_size=size, max_num_seqs=rows) as llm:
            assert [one.token_ids for one in llm.generate(prompts, params)] == wanted
            captured = [one.num_replays for one in (llm.engine.runner._prompts, llm.engine.drafter.runner._prompts)]
            assert all(captured) or (size, rows) == (2048, 4)  # all prompts of which are one pass, too large for that
            assert llm.engine.figures.accepted > 0.1 * llm.engine.figures.drafted


def test_a_draft_that_rested_reads_what_it_lacks_by_captured_passes(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[(7 * i + j) % 256 for i in range(20 + 30 * j)] for j in range(5)]
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    wanted = [tuple(greedy(tiny_target(), prompt, 120)) for prompt in prompts]
    with LLM(*folders, dtype="float32", max_num_seqs=3) as llm:
        graphs, rounds, feeds = llm.engine.drafter.runner._prompts, 0, []

        def choose(_: Controller, __: Any, wishes: Any) -> Choice:
            nonlocal rounds
            rounds += 1
            return Choice([0 if rounds % 24 else min(3, wish.most) for wish in wishes])

        monkeypatch.setattr(Controller, "choose", choose)
        monkeypatch.setattr(llm.engine.drafter.runner, "_feed", lambda *given: feeds.append(given))
        assert [one.token_ids for one in llm.generate(prompts, params)] == wanted
        assert graphs.num_replays > 5 and not feeds  # none of it was launched kernel by kernel
        assert llm.engine.figures.accepted > 0.1 * llm.engine.figures.drafted


def test_the_cache_takes_its_share_of_the_card() -> None:
    with LLM(tiny_target().cuda(), tokenizer=byte_tokenizer(), gpu_memory_utilization=0.5, max_num_seqs=4) as llm:
        assert llm.max_model_len == 512


@pytest.mark.parametrize("name", list(WAYS))
def test_every_way_to_draft_is_captured_and_changes_no_token(
    name: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    target, draft = folders
    how = {"dtype": "float32", "max_num_seqs": 4, "num_speculative_tokens": 9, **WAYS[name]}
    with LLM(target, source_of(name, draft, tmp_path), **how) as llm:
        for settings in SETTINGS:
            assert texts(llm, 9, settings) == texts(llm, "off", settings)
        figures, graphs = llm.engine.figures, llm.engine.graphs
        assert figures.drafted > 0
        assert llm.engine.speculator.num_failures == 0
        assert graphs.num_replays == figures.rounds
