"""What the acceptance cases share: the models and drafters of shared/cases.md under its own names.

T is `target()`; D=, D~ and D! are `draft("same" | "noisy" | "unrelated")`; S(pattern) is `Scripted`; NG(min,max) is
`lookup(min, max)`; BASE is `base(...)`. One engine serves most cases: a request brings its own drafter, so a pair
costs no loading. `cycling(...)` writes a text chosen in advance, for stops and characters.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch

from outrider import LLM, SamplingParams
from outrider.config import Verification
from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.drafter import WithoutCache
from outrider.draft.ngram import NGramDrafter
from outrider.engine.round import Drafting, RoundPlan, propose, verify
from outrider.engine.state import Rows
from outrider.model.runner import TorchRunner
from outrider.proposal import Proposal
from outrider.sampling.random import mixed_seed
from outrider.sampling.rules import RuleTable
from tests.tiny import byte_tokenizer, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.draft.drafter import Drafter, DraftRows
    from outrider.outputs import Completion
    from outrider.sequence import Sequence as Running

torch.set_num_threads(1)  # these models are too small to share work, and other runs want the cores

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [
    list(b"The quick brown fox jumps"),
    list(b"a"),
    list(b"def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"),
    list(b"one two one two one two one"),
    list(b"0123456789"),
    list(b"Zebra"),
]

# --- models


@cache
def target() -> Any:
    return tiny_target()


@cache
def words() -> Any:
    return byte_tokenizer()


def opened(model: Any, **settings: Any) -> LLM:
    """An engine over `model` whose requests may bring any Drafter (or LLM) as their `speculative_model`."""
    llm = LLM(model=model, **{"tokenizer": words(), "max_model_len": 320, **settings})
    loaded = llm.intake._drafter_for
    llm.intake._drafter_for = lambda source: loaded(source) if isinstance(source, LLM) else source
    return llm


@cache
def engine() -> LLM:
    """The one engine over T that most cases use."""
    return opened(target())


@cache
def draft(kind: str) -> LLM:
    """D=, D~ or D!, as an LLM that other engines draft with."""
    return LLM(model=tiny_draft(target(), kind), tokenizer=words(), max_model_len=512, max_num_seqs=1)


@cache
def lookup(smallest: int, largest: int) -> NGramDrafter:
    """NG(min,max,·)."""
    return NGramDrafter(largest, smallest)


@cache
def cycling(text: str | bytes) -> LLM:
    """An engine over a model that writes `text` for ever, from any of its bytes on (which must all differ)."""
    ids = list(text.encode() if isinstance(text, str) else text)
    assert len(set(ids)) == len(ids)
    model = tiny_target(seed=3)
    following = {one: ids[(place + 1) % len(ids)] for place, one in enumerate(ids)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            elif weight.ndim == 1:
                weight.fill_(1.0)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        head.zero_()
        for one, after in following.items():
            head[after] = embedding[one]
    return opened(model)


def drafter_of(llm: LLM, source: LLM) -> DraftModelDrafter:
    """The drafter that `llm` uses for requests that bring `source`."""
    found = llm._drafter_for(source)
    assert isinstance(found, DraftModelDrafter)
    return found


class Scripted(WithoutCache):
    """S(pattern): knows the true continuations, and plants a wrong id where it is told to.

    Args:
        texts: Prompt and true continuation, one list a request.
        right: How many guesses of a row's n-th chain are right before the wrong one; by default all.
        wrong: Makes the wrong id out of the right one.
        longest: Guesses it makes at most, in whatever room.
    """

    context_length: int | None = None
    device_side = False
    makes_trees = False

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        right: Callable[[int], int] | None = None,
        wrong: Callable[[int], int] = lambda token: (token + 1) % 250,
        longest: int = 64,
    ) -> None:
        self.name = f"scripted-{id(self)}"
        self._texts = [list(text) for text in texts]
        self._right, self._wrong, self._longest = right, wrong, longest
        self._chains: dict[int, int] = {}
        self.widths: list[int] = []

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        self.widths.append(num_tokens)
        guesses = torch.zeros(len(rows.slots), num_tokens, dtype=torch.long)
        lengths = torch.zeros(len(rows.slots), dtype=torch.long)
        for row, (slot, length) in enumerate(zip(rows.slots, rows.host_lengths, strict=True)):
            known = rows.tokens[row, :length].tolist()
            ahead = next((one[length:] for one in self._texts if one[:length] == known), [])
            chain = ahead[: min(num_tokens, self._longest)]
            number = self._chains.get(slot, 0)
            self._chains[slot] = number + 1
            right = len(chain) if self._right is None else self._right(number)
            if right < len(chain):
                chain[right] = self._wrong(chain[right])
            guesses[row, : len(chain)] = torch.tensor(chain, dtype=torch.long)
            lengths[row] = len(chain)
        return Proposal(guesses, lengths)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        pass

    def release(self, slot: int) -> None:
        self._chains.pop(slot, None)


# --- runs


def base(prompts: Sequence[Any], llm: LLM | None = None, params: Any = None, **changes: Any) -> list[Completion]:
    """BASE: the same requests with speculation off."""
    return _run(llm or engine(), prompts, params, {"speculation": "off", **changes})


def guessed(
    prompts: Sequence[Any], drafter: Any, k: int, llm: LLM | None = None, params: Any = None, **changes: Any
) -> list[Completion]:
    """The requests with up to k guesses a round from `drafter` (a Drafter or an LLM)."""
    return _run(
        llm or engine(), prompts, params, {"speculative_model": drafter, "num_speculative_tokens": k, **changes}
    )


def _run(llm: LLM, prompts: Sequence[Any], params: Any, changes: dict[str, Any]) -> list[Completion]:
    each = params if isinstance(params, list) else [params or GREEDY] * len(prompts)
    outputs = llm.generate(list(prompts), [one.but(**changes) for one in each])
    return [output.outputs[0] for output in outputs]


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(one.token_ids) for one in completions]


@cache
def _truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return base([list(prompt)], max_tokens=130)[0].token_ids


def truth(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """T's own greedy continuation."""
    assert num_tokens <= 130
    return list(_truth(tuple(prompt))[:num_tokens])


def script(prompts: Sequence[Sequence[int]], right: Callable[[int], int] | None = None, **how: Any) -> Scripted:
    """A Scripted over T's greedy text."""
    return Scripted([[*prompt, *truth(prompt, 130)] for prompt in prompts], right, **how)


def submit(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Running:
    """Queue one request without running it, so that a case can step the engine itself."""
    sequence = llm.intake.sequences(llm.intake.request(list(prompt), params))[0]
    llm.engine.add(sequence)
    return sequence


def idle(llm: LLM) -> bool:
    """Whether all slots and blocks are free again."""
    scheduler = llm.engine.scheduler
    return (
        not llm.engine.busy
        and llm.engine.state.num_free == llm.engine.config.max_num_seqs
        and scheduler.num_free_blocks == scheduler._pool.capacity
    )


class Counted:
    """Counts the passes of a runner while the block runs."""

    def __init__(self, runner: TorchRunner) -> None:
        self.passes = 0
        self._runner = runner

    def __enter__(self) -> Self:
        for name in ("forward", "feed"):
            setattr(self._runner, name, self._counting(getattr(self._runner, name)))
        return self

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            self.passes += 1
            return method(*arguments)

        return counting

    def __exit__(self, *_: object) -> None:
        for name in ("forward", "feed"):
            delattr(self._runner, name)


# --- SYNC


def assert_in_sync(running: Running, runner: TorchRunner, num_cached: int) -> None:
    """The first `num_cached` cached keys and values of a sequence are those of a from-scratch pass over its tokens."""
    if running.slot is None or num_cached <= 0:
        return
    slots = torch.tensor([running.blocks[at // 16] * 16 + at % 16 for at in range(num_cached)])
    kept = [(k[slots].clone(), v[slots].clone()) for k, v in zip(runner.cache.keys, runner.cache.values, strict=True)]
    cache_ = runner._cache
    runner._cache = None
    try:
        runner.allocate(2 + -(-num_cached // 16))
        tables = torch.arange(2, runner.cache.num_blocks)[None]
        runner.feed(
            torch.tensor([running.tokens[:num_cached]]), torch.arange(num_cached)[None], tables, num_cached, None
        )
        fresh = slice(32, 32 + num_cached)
        for layer, (keys, values) in enumerate(kept):
            torch.testing.assert_close(keys, runner.cache.keys[layer][fresh], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, runner.cache.values[layer][fresh], atol=1e-4, rtol=1e-4)
    finally:
        runner._cache = cache_


# --- distributions


class TableRunner:
    """A model whose next-token logits are a table over the last token: exact distributions are then known."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table  # [V, V]
        self.vocab_size = len(table)
        self.context_length = 1 << 20
        self.device = torch.device("cpu")

    def forward(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.table[tokens]

    feed = forward


def tables(seed: int = 0, size: int = 6, distance: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits ``[V, V]``, `distance` apart."""
    draws = torch.Generator().manual_seed(seed)
    target_ = torch.randn(size, size, generator=draws) * 1.2
    return target_, target_ + distance * torch.randn(size, size, generator=draws)


class TableLookup:
    """A lookup-like proposer for tables: always the same guesses, given as certainties."""

    name, context_length = "table-lookup", None

    def __init__(self, guesses: Sequence[int]) -> None:
        self._guesses = torch.tensor(list(guesses))

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        rows_ = len(rows.slots)
        return Proposal(self._guesses[:num_tokens].expand(rows_, -1), torch.full((rows_,), num_tokens))


def sampled(
    table: torch.Tensor,
    drafter: Any,
    verification: str,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    k: int = 3,
    num_tokens: int = 3,
    num_runs: int = 20_000,
) -> tuple[torch.Tensor, float]:
    """Run the engine's own round on many seeds: the first tokens after token 0 ``[runs, num_tokens]``, acceptance."""
    each = [params] if isinstance(params, SamplingParams) else list(params)
    rule_table = RuleTable(num_runs, torch.device("cpu"))
    for place, one in enumerate(each):
        rule_table.write(place, one.but(seed=0), prompt_length=1)
    rules = rule_table.select([run % len(each) for run in range(num_runs)])
    object.__setattr__(rules, "seeds", torch.arange(num_runs) * mixed_seed(11) + mixed_seed(5))
    width = 1 + num_tokens + k + k
    state = SimpleNamespace(
        tokens=torch.zeros(num_runs + 1, width, dtype=torch.long),
        lengths=torch.ones(num_runs + 1).long(),
        limits=torch.full((num_runs + 1,), width),
        idle=num_runs,
    )
    index = torch.arange(num_runs)
    drafted = accepted = 0
    shares = () if drafter is None else (Drafting(drafter, tuple(range(num_runs)), torch.arange(num_runs)),)
    while int(state.lengths[:-1].min()) < 1 + num_tokens:
        lengths = state.lengths[:-1].clone()
        done = lengths > num_tokens
        lengths = lengths.where(~done, 1)  # a finished run goes round again from the start, and is not kept
        rows = Rows(
            tuple(range(num_runs)),
            index,
            state.tokens[:-1].clone(),
            lengths,
            tuple(lengths.tolist()),
            torch.zeros(num_runs, 1, dtype=torch.long),
            None,
            rules,
        )
        plan = RoundPlan(rows, torch.full((num_runs,), k), k, shares, Verification(verification))
        proposal, _ = propose(plan, len(table), _raise)
        before = state.tokens.clone(), state.lengths.clone()
        result = verify(plan, proposal, TableRunner(table), state)  # type: ignore[arg-type]
        counted = ~done
        drafted += int(result.packed[counted, -2].sum())
        accepted += int(result.packed[counted, -3].sum())
        state.tokens[:-1][done] = before[0][:-1][done]
        state.lengths[:-1][done] = before[1][:-1][done]
    return state.tokens[:-1, 1 : 1 + num_tokens], accepted / max(drafted, 1)


def _raise(drafter: Drafter, error: Exception) -> None:
    raise error


def model_drafter(table: torch.Tensor, target_size: int | None = None) -> DraftModelDrafter:
    """The real draft-model drafter over a table."""
    size = target_size or len(table)
    return DraftModelDrafter(TableRunner(table), size, min(size, len(table)))  # type: ignore[arg-type]


def chi_square_p(tokens: torch.Tensor, conditional: torch.Tensor) -> float:
    """The p-value of CHI: joint of the tokens ``[runs, n]`` against a Markov chain ``[V, V]`` started at token 0."""
    size, runs = len(conditional), len(tokens)
    joint = conditional[0].double()
    code = tokens[:, 0]
    for step in range(1, tokens.shape[1]):
        joint = (joint[:, None] * conditional.double()[torch.arange(len(joint)) % size]).flatten()
        code = code * size + tokens[:, step]
    counts = torch.bincount(code, minlength=len(joint)).double()
    assert float(counts[joint == 0].sum()) == 0, "a token came that the target rules out"
    expected = joint * runs
    common = expected >= 5
    groups = [*zip(counts[common].tolist(), expected[common].tolist(), strict=True)]
    if float(expected[~common].sum()) >= 5:
        groups.append((float(counts[~common].sum()), float(expected[~common].sum())))
    if len(groups) == 1:  # nothing is left to chance
        return 1.0
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups)
    degrees = torch.tensor((len(groups) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def shaped_distribution(
    table: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The oracle's own filters, in fp64 and one row at a time: ``[V, V]``."""
    rows = []
    for logits in table.double() / temperature:
        p = logits.softmax(-1)
        keep = torch.ones_like(p, dtype=torch.bool)
        if top_k:
            keep &= logits >= logits.sort(descending=True).values[top_k - 1]
        if top_p < 1:
            left = (p * keep) / (p * keep).sum()
            order = left.argsort(descending=True)
            before = left[order].cumsum(0) - left[order]
            keep[order[before >= top_p]] = False
        keep &= p >= min_p * p.max()
        rows.append(p * keep / (p * keep).sum())
    return torch.stack(rows)
