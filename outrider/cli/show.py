"""How texts and figures are shown: coloured or marked tokens, the closing line, the table, JSON."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from outrider.cli.compare import Comparison
    from outrider.outputs import Completion, SpeculationStats, TokenLogprob, TokenOrigin

__all__ = ["Painter", "comparison_table", "completion_record", "figures", "legend", "summary", "wants_colour"]

COLOURS = {"accepted": "green", "recovered": "red", "bonus": "cyan", "plain": None}
MARKS = {"accepted": ("[", "]"), "recovered": ("{", "}"), "bonus": ("<", ">"), "plain": ("", "")}
MEANINGS = {
    "accepted": "a guess",
    "recovered": "in place of a refused guess",
    "bonus": "after a fully accepted chain",
    "plain": "no guess was made",
}


def wants_colour() -> bool:
    """Whether stdout is a terminal whose user did not say NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _painted(piece: str, origin: TokenOrigin, colour: bool) -> str:
    if colour:
        return typer.style(piece, fg=COLOURS[origin]) if COLOURS[origin] else piece
    before, after = MARKS[origin]
    return before + piece + after


def legend(colour: bool) -> str:
    """Explain colours or marks."""
    parts = (f"{_painted(name, name, colour)} ({meaning})" for name, meaning in MEANINGS.items())
    return "tokens: " + ", ".join(parts)


class Painter:
    """Paints each token by how it came.

    Decodes token by token beside the engine's own decoding, and lets out as many characters as that has settled: text
    held back for a stop string is painted when it comes.
    """

    def __init__(self, decoder: Any, colour: bool) -> None:
        self._decoder = decoder
        self._colour = colour
        self._waiting: list[tuple[str, TokenOrigin]] = []

    def paint(self, text: str, token_ids: Sequence[int], origins: Sequence[TokenOrigin], *, final: bool = True) -> str:
        """Give `text` painted, token by token; `token_ids` are new, `text` may lag behind them."""
        for token, origin in zip(token_ids, origins, strict=True):
            self._decoder.push(token)
            self._wait(origin)
        if final:
            self._decoder.finish()
            self._wait(origins[-1] if origins else "plain")
        room, painted = len(text), ""
        while room and self._waiting:
            piece, origin = self._waiting.pop(0)
            if len(piece) > room:
                self._waiting.insert(0, (piece[room:], origin))
            painted += _painted(piece[:room], origin, self._colour)
            room -= min(room, len(piece))
        return painted + text[len(text) - room :]

    def _wait(self, origin: TokenOrigin) -> None:
        piece = self._decoder.take(final=True)
        if piece:
            self._waiting.append((piece, origin))


def figures(stats: SpeculationStats) -> dict[str, Any]:
    """Give one text's figures, for JSON."""
    return {
        "tokens": stats.tokens,
        "seconds": round(stats.seconds, 6),
        "tokens_per_second": round(stats.tokens / stats.seconds, 3) if stats.seconds else 0.0,
        "first_token_seconds": round(stats.first_token_seconds, 6),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "acceptance_by_position": [round(one, 4) for one in stats.acceptance_by_position],
        "tokens_per_round": round(stats.tokens_per_round, 4),
        "by_drafter": {name: {"drafted": made, "accepted": right} for name, (made, right) in stats.by_drafter.items()},
        "lossy": stats.lossy,
    }


def completion_record(prompt: Any, completion: Completion, prompt_logprobs: Any = None) -> dict[str, Any]:
    """Give one text as JSON has it."""
    record = {
        "prompt": prompt,
        "sample": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "figures": figures(completion.stats),
    }
    if completion.error is not None:
        record["error"] = completion.error
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(one) for one in completion.logprobs]
    if prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprob(one) for one in prompt_logprobs]
    return record


def _logprob(one: TokenLogprob | None) -> dict[str, Any] | None:
    return None if one is None else asdict(one)


def summary(stats: Sequence[SpeculationStats], seconds: float) -> str:
    """Tell in one line how it went."""
    tokens, rounds = sum(one.tokens for one in stats), sum(one.rounds for one in stats)
    drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
    texts = f"{len(stats)} texts, " if len(stats) > 1 else ""
    line = f"{texts}{tokens} tokens in {seconds:.2f} s, {tokens / seconds if seconds else 0:.1f} tok/s"
    if not drafted:
        return line + "; no guesses"
    lossy = "; lossy" if any(one.lossy for one in stats) else ""
    return (
        f"{line}; accepted {accepted} of {drafted} guesses ({accepted / drafted:.0%}), "
        f"{tokens / rounds:.2f} tokens a round{_by_drafter(stats)}{lossy}"
    )


def _by_drafter(stats: Sequence[SpeculationStats]) -> str:
    """Tell what each part of a mixture was right in."""
    names = dict.fromkeys(name for one in stats for name in one.by_drafter)
    counts = {name: [one.by_drafter[name] for one in stats if name in one.by_drafter] for name in names}
    shares = [
        f"{name} {sum(right for _, right in told)} of {sum(made for made, _ in told)}" for name, told in counts.items()
    ]
    return f" ({', '.join(shares)})" if shares else ""


def comparison_table(comparison: Comparison) -> Table:
    """Lay out plain and speculative side by side."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    rows: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("tokens", lambda run: f"{run.tokens}"),
        ("tok/s", lambda run: f"{run.tokens_per_second:.1f}"),
        ("speedup", lambda run: f"{run.tokens_per_second / comparison.plain.tokens_per_second:.2f}x"),
        ("acceptance", lambda run: f"{run.acceptance_rate:.0%}" if run.drafted else "-"),
        ("tokens/round", lambda run: f"{run.tokens_per_round:.2f}"),
    )
    for name, _ in rows:
        table.add_column(name, justify="right")
    for name, run in (("plain", comparison.plain), ("speculative", comparison.speculative)):
        table.add_row(name, *(tell(run) for _, tell in rows))
    return table
