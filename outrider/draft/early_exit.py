"""The target's own layers as its draft: which of them to keep, found on sample texts.

The first layers alone (LayerSkip, 2404.16710), or all but a set of skipped ones (SWIFT, 2410.06916), with the target's
own norm and head, on the target's own cache: no weights, no second cache, no training. It pays where a model decides
early what comes next; a model trained for that (LayerSkip's checkpoints) decides far earlier.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import ConfigError
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED, blocks_for
from outrider.model.subset import LayerSubsetRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outrider.model.runner import TorchRunner

__all__ = ["SAMPLE_TOKENS", "ExitChoice", "SampleText", "best_exit", "best_skips", "kept_layers", "own_texts"]

logger = logging.getLogger("outrider")
SAMPLE_TOKENS = 48  # that the target continues each sample prompt by, to be guessed
HEAD_LAYERS = 1.0  # what norm and head cost, in layers: a guess is not free however few layers make it


@dataclass(frozen=True)
class ExitChoice:
    """Layers to draft with.

    Attributes:
        keep: Their indices, in order.
        agreement: Share of the sample tokens on which they choose what the whole target does.
        speedup: Tokens a second by plain decoding's, as estimated from that and from the number of layers.
    """

    keep: tuple[int, ...]
    agreement: float
    speedup: float


def kept_layers(num_layers: int, exit_layer: int | None, skip_layers: Sequence[int] | None) -> tuple[int, ...]:
    """Work out which layers draft, where the user has said so.

    Args:
        num_layers: The target's.
        exit_layer: Draft with so many first layers.
        skip_layers: Or with all but these.

    Raises:
        ConfigError: There is no such layer, or nothing would be left, or nothing be saved.
    """
    if exit_layer is not None:
        if not 1 <= exit_layer < num_layers:
            raise ConfigError(f"exit_layer must be 1 to {num_layers - 1} for a model of {num_layers}, got {exit_layer}")
        return tuple(range(exit_layer))
    skipped = sorted(set(skip_layers or ()))
    if not skipped or skipped[0] < 0 or skipped[-1] >= num_layers or len(skipped) == num_layers:
        raise ConfigError(
            f"skip_layers must name some of the layers 0 to {num_layers - 1}, but not all of them, got {skip_layers!r}"
        )
    return tuple(layer for layer in range(num_layers) if layer not in skipped)


@torch.inference_mode()
def own_texts(
    runner: TorchRunner, prompts: Iterable[Sequence[int]], num_tokens: int = SAMPLE_TOKENS
) -> list[SampleText]:
    """Let the target continue each prompt greedily; the runner's cache is used, and nobody else may use it meanwhile.

    A prompt longer than the context leaves room for is cut at its beginning.
    """
    made = []
    for prompt in prompts:
        room = runner.context_length - num_tokens
        text = list(prompt)[-max(1, room) :]
        begin = len(text)
        end = min(begin + num_tokens, runner.context_length)
        runner.allocate(RESERVED + blocks_for(end))
        tables = torch.arange(RESERVED, RESERVED + blocks_for(end), device=runner.device)[None]
        fed = 0
        while len(text) < end:
            positions = torch.arange(fed, len(text), device=runner.device)[None]
            tokens = torch.tensor([text[fed:]], device=runner.device)
            logits = runner.forward(tokens, positions, tables, len(text), RESERVED * BLOCK_SIZE)
            fed = len(text)
            text.append(int(logits[0, -1].argmax()))
        made.append(SampleText(torch.tensor([text], device=runner.device), begin, tables))
    return made


@dataclass(frozen=True)
class SampleText:
    """A text that the target made: ``[1, L]``, its own from `begin` on; and blocks to compute it in."""

    tokens: torch.Tensor
    begin: int
    tables: torch.Tensor


def best_exit(runner: TorchRunner, texts: Sequence[SampleText], num_guesses: int) -> ExitChoice:
    """Try every number of first layers; give the one with the best estimated speedup."""
    num_layers = len(runner.layers)
    if num_layers < 2:
        raise ConfigError("a model of one layer has no earlier exit; choose another method")
    tried = [_tried(runner, tuple(range(count)), texts, num_guesses) for count in range(1, num_layers)]
    return _reported(max(tried, key=lambda one: one.speedup))


def best_skips(runner: TorchRunner, texts: Sequence[SampleText], num_guesses: int) -> ExitChoice:
    """Skip layers one by one, each time the one that is missed least, while the estimated speedup grows.

    SWIFT searches at random and by a Gaussian process; this greedy way needs fewer trials on few layers, and gives the
    same set every time. A pass over the samples computes past tokens by the kept layers too, while drafting reads the
    target's own: the real agreement is a little higher.
    """
    keep, best = tuple(range(len(runner.layers))), None
    while len(keep) > 1:
        tried = [_tried(runner, part, texts, num_guesses) for part in _without_one(keep)]
        step = max(tried, key=lambda one: one.speedup)
        if best is not None and step.speedup <= best.speedup:
            break
        keep, best = step.keep, step
    if best is None:
        raise ConfigError("a model of one layer has none to skip; choose another method")
    return _reported(best)


def _without_one(keep: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return (keep[:place] + keep[place + 1 :] for place in range(len(keep)))


def _tried(runner: TorchRunner, keep: tuple[int, ...], texts: Sequence[SampleText], num_guesses: int) -> ExitChoice:
    agreement = _agreement(LayerSubsetRunner(runner, keep), texts)
    step = (len(keep) + HEAD_LAYERS) / (len(runner.layers) + HEAD_LAYERS)
    expected = sum(agreement**guesses for guesses in range(num_guesses + 1))
    return ExitChoice(keep, agreement, expected / (1 + num_guesses * step))


@torch.inference_mode()
def _agreement(draft: LayerSubsetRunner, texts: Sequence[SampleText]) -> float:
    """Share of the target's own tokens that the draft chooses too, given all before them."""
    right = total = 0
    for text in texts:
        length = text.tokens.shape[1]
        positions = torch.arange(length, device=text.tokens.device)[None]
        logits = draft.forward(text.tokens, positions, text.tables, length, RESERVED * BLOCK_SIZE)
        guessed = logits[0, text.begin - 1 : -1].argmax(-1)
        right += int((guessed == text.tokens[0, text.begin :]).sum())
        total += length - text.begin
    return right / max(1, total)


def _reported(choice: ExitChoice) -> ExitChoice:
    words = "early exit drafts with layers %s: %.0f %% of the sample tokens agree, speedup by estimate %.2f"
    logger.info(words, list(choice.keep), 100 * choice.agreement, choice.speedup)
    return choice
