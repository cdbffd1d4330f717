"""Predicted speedups of a plan: by method, batch and agreement, with the draft length that is best there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.advice.footprint import HeadFootprint, ModelFootprint
from outrider.advice.prediction import Drafting, Machine, PassLoad, best_length, predicted_speedup
from outrider.bench.heads import eagle3_tensors
from outrider.bench.shapes import Shape
from outrider.config import Method
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.config import SpeculationConfig

__all__ = ["AGREEMENTS", "ASSUMPTIONS", "BATCHES", "CONTEXT", "LENGTHS", "Forecast", "forecasts"]

AGREEMENTS = (0.5, 0.6, 0.7, 0.8, 0.9)
BATCHES = (1, 4, 16)
LENGTHS = range(9)
CONTEXT = 1024  # tokens of each row's text
AT_ONCE = (Method.MEDUSA, Method.DFLASH)  # one pass makes all guesses of a round

ASSUMPTIONS = (
    (
        "Predicted, not measured: a pass takes as long as reading its bytes at the stated bandwidth, or as its "
        "arithmetic at the stated peak, whichever is longer."
    ),
    (
        "Every guess agrees with the same chance, whatever came before it: E(k) = 1 + a + ... + a^k (Leviathan et al., "
        "2211.17192). Lookup has guesses only where text repeats."
    ),
    "The host, launches and kernels below peak are left out. They cost small drafts most, so expect less.",
)


@dataclass(frozen=True)
class Forecast:
    """What one way of drafting is predicted to bring at one batch size and agreement.

    Attributes:
        method: What drafts.
        rows: Sequences together.
        agreement: Chance that a guess agrees.
        best: The best draft length, 0 where plain decoding is.
        speedup: With that length.
        by_length: Draft length -> speedup.
    """

    method: str
    rows: int
    agreement: float
    best: int
    speedup: float
    by_length: dict[int, float]


def forecasts(
    target: ModelFootprint,
    draft: ModelFootprint | HeadFootprint | None,
    speculation: SpeculationConfig,
    machine: Machine | None,
    context: int,
) -> tuple[Forecast, ...]:
    """Predict for the draft that is named, for lookup, and, where no draft is named, for a head of the usual size."""
    where, load = machine or Machine(1.0), _at(target.passed, context)
    return tuple(
        _one(name, load, drafting, rows, agreement, where)
        for name, drafting in _ways(target, draft, speculation, context).items()
        for rows in BATCHES
        for agreement in AGREEMENTS
    )


def _one(name: str, load: PassLoad, drafting: Drafting, rows: int, agreement: float, machine: Machine) -> Forecast:
    by_length = {one: predicted_speedup(agreement, load, drafting, rows, one, machine) for one in LENGTHS}
    best, gain = best_length(agreement, load, drafting, rows, machine, max(LENGTHS))
    return Forecast(name, rows, agreement, best, gain, by_length)


def _at(load: PassLoad, context: int) -> PassLoad:
    """The same pass, over rows that look back on so many tokens."""
    return replace(load, kv=load.kv * context)


def _ways(
    target: ModelFootprint, draft: ModelFootprint | HeadFootprint | None, speculation: SpeculationConfig, context: int
) -> dict[str, Drafting]:
    ways = {"lookup (ngram)": Drafting(None)}
    if isinstance(draft, ModelFootprint):
        ways[f"draft model {draft.name}"] = Drafting(_at(draft.passed, context))
    elif draft is not None:
        method = next(one for one in speculation.methods if one not in (Method.NGRAM, Method.SUFFIX))
        ways[f"{method} head {draft.name}"] = Drafting(draft.passed, at_once=method in AT_ONCE)
    elif Method.EARLY_EXIT in speculation.methods:
        ways |= _early_exit(target, speculation.exit_layer, context)
    else:
        usual = _usual_head(target)
        ways |= {"EAGLE-3 head of the usual size": Drafting(usual)} if usual else {}
    return ways


def _early_exit(target: ModelFootprint, exit_layer: int | None, context: int) -> dict[str, Drafting]:
    layers = len(target.runner.layers)
    kept = min(exit_layer or layers // 2, layers)
    load = _at(target.passed, context)
    part = PassLoad(load.weights * kept / layers, load.kv * kept / layers, load.parameters * kept / layers)
    return {f"early exit after {kept} of {layers} layers": Drafting(part)}


def _usual_head(target: ModelFootprint) -> PassLoad | None:
    """What an EAGLE-3 head as its authors make them would read; None for a target that such heads do not suit."""
    config = target.runner.model.config.get_text_config()
    layer = target.runner.layers[0]
    try:
        heads = int(config.num_attention_heads)
        sizes = int(config.hidden_size), len(target.runner.layers), heads, layer.num_kv_heads, layer.key_dim
        shape = Shape(*sizes, int(config.intermediate_size), target.vocab_size)
        numbers = sum(math.prod(one) for one in eagle3_tensors(shape, min(32000, target.vocab_size)).values())
    except (AttributeError, ConfigError):
        return None
    return PassLoad(float(numbers * target.runner.dtype.itemsize), parameters=float(numbers))
