"""A plan: what an engine would take and bring, from configs alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.advice.bill import Bill, billed, place_here, place_of
from outrider.advice.cards import CARDS, known_card
from outrider.advice.families import Candidate, candidates
from outrider.advice.footprint import HeadFootprint, ModelFootprint, head_footprint, model_footprint
from outrider.advice.forecast import CONTEXT, Forecast, forecasts
from outrider.advice.sources import ModelSource, head_source, model_source, shape_source
from outrider.advice.words import Overlap, overlap
from outrider.bench.shapes import parse_shape
from outrider.config import EngineConfig, Method
from outrider.errors import ConfigError
from outrider.llm import PREFILL_CHUNK
from outrider.model.quantize import check_kind
from outrider.setup import check_draft_quantization, check_exact, resolve_device, speculation_of

if TYPE_CHECKING:
    from outrider.advice.bill import Place
    from outrider.advice.cards import Card
    from outrider.advice.prediction import Machine
    from outrider.config import SpeculationConfig

__all__ = ["Plan", "planned"]

_FOUR_BITS = 4.5 / 16  # of 16-bit weights, scales included


@dataclass(frozen=True)
class Plan:
    """What is known before anything is loaded.

    Attributes:
        target, draft: Their names; no draft where none has memory of its own.
        method: What drafts.
        bill: The memory bill.
        overlap: Of the vocabularies; None where one is not known, or nothing drafts with a vocabulary.
        forecasts: Predicted speedups.
        machine: What they were made for; None: ratios of bytes alone.
        candidates: Drafts known for this target.
        remedies: What would make it fit; empty where it does.
        notes: What was taken for granted.
    """

    target: str
    draft: str | None
    method: str
    bill: Bill
    overlap: Overlap | None
    forecasts: tuple[Forecast, ...]
    machine: Machine | None
    candidates: tuple[Candidate, ...]
    remedies: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Request:
    """All that a plan is made of."""

    target: ModelFootprint
    draft: ModelFootprint | HeadFootprint | None
    config: EngineConfig
    speculation: SpeculationConfig
    place: Place

    def bill(self) -> Bill:
        return billed(self.target, self.draft, self.config, self.speculation.num_speculative_tokens, self.place)


def planned(
    arguments: dict[str, Any],
    *,
    shape: str | None = None,
    draft_shape: str | None = None,
    card: Card | None = None,
    context: int | None = None,
) -> Plan:
    """Make a plan.

    Args:
        arguments: What `LLM` would be given.
        shape, draft_shape: Sizes in place of models, see `outrider.bench.shapes`.
        card: The card to plan for; None plans for this machine, or `arguments["device"]` of it.
        context: Tokens of context that speedups are predicted for; by default 1024, or as many as the model knows.

    Raises:
        ConfigError: A setting is out of range, or contradicts another; the context is beyond the model's.
        ModelLoadError: A model is missing or broken.
        UnsupportedModelError: A model cannot be served.
    """
    device = torch.device("cuda") if card else resolve_device(arguments.get("device"))
    speculation = _speculation(arguments, draft_shape)
    _check(arguments, speculation, device)
    place = place_of(card) if card else place_here(device)
    source = _source(arguments.get("model"), shape, arguments)
    how: dict[str, Any] = {"device": device, "here": card is None}
    target = model_footprint(source, dtype=arguments.get("dtype"), quantization=arguments.get("quantization"), **how)
    if context is not None and context > target.context_length:
        raise ConfigError(
            f"context={context} is beyond the model's context of {target.context_length} tokens; ask for no more"
        )
    words = source.words
    draft, drafts_words = _draft(arguments, speculation, draft_shape, target, how)
    request = _Request(target, draft, _engine_config(arguments, device), speculation, place)
    bill = request.bill()
    looking_back = min(CONTEXT, target.context_length) if context is None else context
    machine = card or (known_card(place.name) if device.type == "cuda" else None)
    return Plan(
        target=target.name,
        draft=draft.name if draft else None,
        method=speculation.method,
        bill=bill,
        overlap=overlap(words, drafts_words) if words and drafts_words else None,
        forecasts=forecasts(target, draft, speculation, machine.machine if machine else None, looking_back),
        machine=machine.machine if machine else None,
        candidates=tuple(candidates(f"{shape}-instruct" if shape in _named_shapes() else target.name)),
        remedies=() if bill.fits else tuple(_remedies(request, bill)),
        notes=(*target.notes, *getattr(draft, "notes", ()), *_notes(arguments, draft, bill)),
    )


def _speculation(arguments: dict[str, Any], draft_shape: str | None) -> SpeculationConfig:
    if draft_shape is None:
        return speculation_of(arguments)
    if arguments.get("speculative_model") is not None:
        model = arguments["speculative_model"]
        raise ConfigError(f"the draft is given twice: {model!r} and the shape {draft_shape!r}; give one")
    return speculation_of({**arguments, "speculative_model": draft_shape, "method": Method.DRAFT_MODEL})


def _check(arguments: dict[str, Any], speculation: SpeculationConfig, device: torch.device) -> None:
    """Refuse what the engine would refuse."""
    check_exact(bool(arguments.get("exact")), speculation)
    check_kind(arguments.get("quantization"), device)
    check_draft_quantization(speculation.draft_quantization, speculation.model, device)


def _source(model: Any, shape: str | None, arguments: dict[str, Any]) -> ModelSource:
    if shape is None:
        return model_source(model, arguments.get("revision"))
    if model is not None:
        raise ConfigError(f"the target is given twice: {model!r} and the shape {shape!r}; give one")
    return shape_source(parse_shape(shape), shape)


def _named_shapes() -> set[str]:
    from outrider.bench.shapes import SHAPES

    return set(SHAPES)


def _draft(
    arguments: dict[str, Any],
    speculation: SpeculationConfig,
    draft_shape: str | None,
    target: ModelFootprint,
    how: dict[str, Any],
) -> tuple[ModelFootprint | HeadFootprint | None, Any]:
    """What drafts with memory of its own, and its vocabulary."""
    if speculation.num_speculative_tokens == 0:
        return None, None
    dtype = arguments.get("draft_dtype") or arguments.get("dtype")
    if speculation.drafts_with_model:
        if draft_shape is not None:
            source = shape_source(parse_shape(draft_shape, target.vocab_size), draft_shape)
        else:
            source = model_source(speculation.model)
        return model_footprint(source, dtype=dtype, quantization=speculation.draft_quantization, **how), source.words
    for method in speculation.methods:
        if method is Method.MTP:
            return head_footprint(head_source(_own_files(arguments)), method, target), None
        if method.takes_model:
            return head_footprint(head_source(speculation.model), method, target), None
    return None, None


def _own_files(arguments: dict[str, Any]) -> str:
    if arguments.get("model") is None:
        raise ConfigError("method 'mtp' drafts with what the target's own files hold; name the target")
    return str(arguments["model"])


def _engine_config(arguments: dict[str, Any], device: torch.device) -> EngineConfig:
    names = ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "kv_cache_bytes", "exact")
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    return EngineConfig(prefill_chunk_size=PREFILL_CHUNK[device.type == "cuda"], **given)


def _notes(arguments: dict[str, Any], draft: ModelFootprint | HeadFootprint | None, bill: Bill) -> list[str]:
    notes = []
    reach = draft.context_length if draft else None
    if draft is not None and reach is not None and reach < bill.max_model_len:
        notes.append(f"{draft.name} was made for {reach} tokens: longer texts go on without its guesses")
    if arguments.get("draft_device") is not None:
        notes.append(f"the draft is counted where the target is, not on {arguments['draft_device']}")
    if arguments.get("draft_vocab_size") is not None:
        notes.append("the draft's head is counted whole, although draft_vocab_size cuts it")
    return notes


# --- what would fit


def _remedies(request: _Request, bill: Bill) -> list[str]:
    """What to change, each tried with the same arithmetic."""
    config, place = request.config, request.place
    found = []
    room = bill.longest_alone
    if bill.over == 0 and room >= 2:
        lookahead = request.speculation.num_speculative_tokens
        each = room_for(bill, config.max_num_seqs, lookahead)
        if 2 <= each < bill.max_model_len:
            found.append(f"shorter texts: --max-model-len {each} with {config.max_num_seqs} sequences")
        fit = bill.sequences.get(bill.max_model_len, 0)
        if 1 <= fit < config.max_num_seqs:
            found.append(f"fewer sequences: --max-num-seqs {fit} at {bill.max_model_len} tokens")
        if fit == 0:
            found.append(f"one sequence of at most {room} tokens: --max-model-len {room} --max-num-seqs 1")
    found += _smaller_weights(request)
    if place.device == "cuda":
        others = (card for card in sorted(CARDS, key=lambda card: card.memory) if card.name != place.name)
        larger = next((card for card in others if replace(request, place=place_of(card)).bill().fits), None)
        found.append(f"another card: {larger.name} would hold it" if larger else _NO_CARD)
    return found


_NO_CARD = "no single card of the table holds it: a smaller model, or one quantised to fp8 or 4 bits"


def room_for(bill: Bill, sequences: int, lookahead: int) -> int:
    """Longest length at which so many sequences fit, in whole blocks, guesses behind them included."""
    from outrider.engine.memory import pool_tokens
    from outrider.model.kv_cache import BLOCK_SIZE

    each = pool_tokens(bill.budget, bill.per_token) // sequences // BLOCK_SIZE * BLOCK_SIZE
    return max(0, each - lookahead)


def _smaller_weights(request: _Request) -> list[str]:
    """Weights in fewer bits, where the bill would then fit."""
    target, found = request.target, []
    dense = {"bfloat16", "float16", "float32"}
    plain = sum(size for kind, size in target.weights.items() if kind in dense)
    if plain and not set(target.weights) - dense:
        small = replace(target, weights={"int4": int(plain * _FOUR_BITS * 2 / target.runner.dtype.itemsize)})
        if replace(request, target=small).bill().fits:
            way = "--quantization int4" if request.place.device == "cpu" else "a checkpoint quantised to 4 bits"
            found.append(f"fewer bits: {way} takes about {small.num_bytes / 2**30:.1f} GiB for the target")
    if request.draft is not None and replace(request, draft=None).bill().fits:
        found.append(f"no draft with weights: without {request.draft.name} it fits (--method ngram)")
    return found
