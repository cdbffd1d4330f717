"""The memory bill of an engine that is not loaded: by the engine's own arithmetic, and what fits into a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_DRAFT_TOKENS
from outrider.engine.memory import (
    CHUNKS_ON_CARD,
    GRAPH_BYTES,
    budget_on_card,
    budget_on_cpu,
    fitted,
    free_memory,
    pool_tokens,
    score_bytes,
)
from outrider.engine.state import DeviceState
from outrider.errors import CapacityError, ConfigError
from outrider.model.kv_cache import BLOCK_SIZE, blocks_for

if TYPE_CHECKING:
    from outrider.advice.cards import Card
    from outrider.advice.footprint import HeadFootprint, ModelFootprint
    from outrider.config import EngineConfig

__all__ = ["Bill", "Line", "Place", "billed", "place_here", "place_of"]

CONTEXT_BYTES = 1 << 29  # what CUDA and the libraries keep for themselves: an assumption
FLOATS_BETWEEN = 3  # residual, its norm, and the sum of both at most: a chunk's hidden states that are alive at once


@dataclass(frozen=True)
class Place:
    """Where an engine would run.

    Attributes:
        name: For people.
        device: "cpu" or "cuda".
        total, free: Bytes of memory, and what of it can be had before anything is loaded.
        here: Whether it is this machine.
    """

    name: str
    device: str
    total: int
    free: int
    here: bool


@dataclass(frozen=True)
class Line:
    """One item of a bill; `how` says where the number is from: "exact", "estimate" or "assumption"."""

    what: str
    num_bytes: int
    how: str
    detail: str = ""


@dataclass(frozen=True)
class Bill:
    """What an engine takes, and what fits.

    Attributes:
        place: Where.
        lines: What it is made of; the cache is the one of `num_blocks`.
        per_token: Bytes that a token takes in all caches together.
        budget: Bytes that there are for keys and values.
        wanted_tokens: Tokens of cache that all sequences at full length ask for.
        num_blocks: Blocks that the engine would make; 0 where it would refuse to start.
        max_model_len: Longest sequence, as it would be.
        max_num_seqs: Sequences together, as asked.
        problem: Why it would not start, or not hold all that was asked; empty where it does.
        sequences: Length -> sequences of that length that fit together, whatever was asked.
        longest_alone: Longest sequence that fits where it is the only one.
        over: Bytes by which weights and working memory exceed what there is; 0 where they fit.
    """

    place: Place
    lines: tuple[Line, ...]
    per_token: int
    budget: int
    wanted_tokens: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    problem: str
    sequences: dict[int, int]
    longest_alone: int
    over: int

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def fits(self) -> bool:
        """Whether all that was asked fits."""
        return not self.problem


def place_here(device: torch.device) -> Place:
    """This machine's memory as it is now.

    Raises:
        ConfigError: It has no such device.
    """
    seen = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= seen:
        raise ConfigError(
            f"device {str(device)!r} was asked for, but this torch sees {seen or 'no'} CUDA GPUs; name a card to plan "
            "for with --gpu"
        )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Place(torch.cuda.get_device_name(device), "cuda", total, free, here=True)
    free = free_memory()
    return Place("this machine's CPU", "cpu", free, free, here=True)


def place_of(card: Card) -> Place:
    """A card that nothing else uses."""
    return Place(card.name, "cuda", card.total_bytes, card.total_bytes, here=False)


def billed(
    target: ModelFootprint,
    draft: ModelFootprint | HeadFootprint | None,
    config: EngineConfig,
    lookahead: int,
    place: Place,
) -> Bill:
    """Write the bill.

    Args:
        target: The model.
        draft: What drafts with memory of its own.
        config: What was asked for.
        lookahead: Guesses a round at most.
        place: Where.

    Raises:
        ConfigError: `config.max_model_len` is beyond the model's context.
    """
    per_token = target.bytes_per_slot + _features(draft) + (draft.bytes_per_slot if draft else 0)
    fixed, working = _fixed(target, draft, place), _working(target, config, lookahead, place)
    taken, on_top = (sum(line.num_bytes for line in lines) for lines in (fixed, working))
    budget = _budget(config, place, taken, on_top)
    made, blocks, problem = config, 0, ""
    try:
        made, blocks = fitted(config, target.context_length, per_token, lookahead, budget)
    except CapacityError as error:
        problem = str(error)
    longest = config.max_model_len or target.context_length
    held, each = pool_tokens(budget, per_token), blocks_for(longest + lookahead) * BLOCK_SIZE
    if not problem and config.max_model_len is not None and held < config.max_num_seqs * each:
        problem = (
            f"only {held // each} of {config.max_num_seqs} sequences of {longest} tokens fit at full length: the "
            "others would wait, or be sent away and computed again"
        )
    length = made.max_model_len or longest
    state = Line("texts and tables", _state_bytes(replace(config, max_model_len=length), lookahead), "exact")
    cache = Line("keys and values", blocks * BLOCK_SIZE * per_token, "exact", _cache_detail(target, draft, blocks))
    return Bill(
        place=place,
        lines=(*fixed, cache, *working, state),
        per_token=per_token,
        budget=budget,
        wanted_tokens=config.max_num_seqs * each,
        num_blocks=blocks,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        problem=problem,
        sequences=_sequences(held, length, target.context_length, lookahead),
        longest_alone=min(held, target.context_length),
        over=max(0, taken + on_top - _ceiling(config, place)),
    )


def _fixed(target: ModelFootprint, draft: ModelFootprint | HeadFootprint | None, place: Place) -> list[Line]:
    """What is there before the cache."""
    lines = _weights(target, "target") + (_weights(draft, "draft") if draft else [])
    if place.device == "cuda" and not place.here:  # here, this process has them already: they are not free
        lines.append(Line("CUDA and libraries", CONTEXT_BYTES, "assumption"))
    return lines


def _working(target: ModelFootprint, config: EngineConfig, lookahead: int, place: Place) -> list[Line]:
    """What passes need beside it. A card keeps room for it; beside a CPU it comes and goes."""
    positions = f"{config.max_num_seqs} x {lookahead + 1} positions x {target.vocab_size} tokens"
    how = "exact" if place.device == "cuda" else "estimate"
    chunks = CHUNKS_ON_CARD if place.device == "cuda" else 1
    prompt = f"{config.prefill_chunk_size} prompt tokens{', passed and captured' if chunks > 1 else ''}"
    lines = [
        Line("activations", chunks * _activations(target, config), "estimate", prompt),
        Line("logits and sampling", score_bytes(config, lookahead, target.vocab_size), how, positions),
    ]
    if place.device == "cuda":
        lines.append(Line("captured rounds", GRAPH_BYTES, "exact", "CUDA graphs, as the engine reserves for them"))
    return lines


def _features(draft: ModelFootprint | HeadFootprint | None) -> int:
    return int(getattr(draft, "features_per_slot", 0))


def _weights(model: ModelFootprint | HeadFootprint, role: str) -> list[Line]:
    kinds = getattr(model, "weights", None)
    if kinds is None:
        return [Line(f"{role}'s head", model.num_bytes, "exact", model.name)]
    return [Line(f"{role}, {kind}", size, "exact", model.name) for kind, size in kinds.items()]


def _budget(config: EngineConfig, place: Place, taken: int, working: int) -> int:
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    free = max(0, place.free - taken)
    return budget_on_card(config, free, place.total, working) if place.device == "cuda" else budget_on_cpu(free)


def _ceiling(config: EngineConfig, place: Place) -> int:
    """Bytes that weights and working memory may take at most."""
    if place.device == "cpu":
        return place.free
    return int(place.total * config.gpu_memory_utilization) - (place.total - place.free)


def _activations(target: ModelFootprint, config: EngineConfig) -> int:
    """A chunk of a prompt in its widest layer; a card measures this when it starts."""
    text = target.runner.model.config.get_text_config()
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    tokens = min(config.prefill_chunk_size, target.context_length)
    return tokens * (FLOATS_BETWEEN * hidden + 3 * inner) * target.runner.dtype.itemsize


def _state_bytes(config: EngineConfig, lookahead: int) -> int:
    """Of the tensors that hold texts, lengths, tables: made without memory by the engine's own code."""
    room = lookahead if config.exact else MAX_DRAFT_TOKENS
    assert config.max_model_len is not None
    state = DeviceState(config.max_num_seqs, config.max_model_len, room, torch.device("meta"))
    return sum(one.nbytes for one in (state.tokens, state.lengths, state.limits, state.tables))


def _cache_detail(target: ModelFootprint, draft: ModelFootprint | HeadFootprint | None, blocks: int) -> str:
    parts = [f"target {target.bytes_per_slot}"]
    parts += [f"draft {draft.bytes_per_slot}"] if draft is not None and draft.bytes_per_slot else []
    parts += [f"hidden states {_features(draft)}"] if _features(draft) else []
    return f"{blocks} blocks of {BLOCK_SIZE} tokens; bytes a token: {', '.join(parts)}"


def _sequences(held: int, length: int, context: int, lookahead: int) -> dict[int, int]:
    lengths = sorted({one for one in (1024, 4096, 16384, 65536) if one < context} | {length, context})
    return {one: held // (blocks_for(one + lookahead) * BLOCK_SIZE) for one in lengths}
