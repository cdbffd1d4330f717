"""The ways that gpu_methods.py measures, the bytes that a round of each reads, and its table. Nothing here runs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.terminal import Table
from outrider.bench.heads import EAGLE3_VOCAB, MEDUSA_HEADS, eagle3_tensors, medusa_tensors
from outrider.bench.shards import num_bytes
from outrider.draft.fixed_tree import PUBLISHED_TREE
from outrider.draft.tree import DEEPEST, TreeShape

if TYPE_CHECKING:
    from outrider.bench.shapes import Shape

__all__ = ["PLAIN", "WAYS", "Way", "cell_of", "draft_vocab", "methods_table", "round_bytes"]

PLAIN = "plain"
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Way:
    """A way to draft.

    Attributes:
        name: What tables call it.
        method: As `LLM` takes it.
        guesses: Of a round; of trees all nodes count.
        tree: Whether guesses are trees.
        model: Which folder of weights it needs: "draft", "eagle3" or "medusa".
    """

    name: str
    method: str
    guesses: int
    tree: bool = False
    model: str | None = None

    @property
    def random(self) -> bool:
        """Whether its weights are random, so that its guesses are wrong and its tokens a second mean nothing."""
        return self.model in ("eagle3", "medusa")

    @property
    def deepest(self) -> int:
        """Guesses that a round may accept at most."""
        return min(DEEPEST, self.guesses) if self.tree else self.guesses

    def options(self, target: Shape) -> dict[str, Any]:
        """What `LLM` is told besides its models."""
        told: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.guesses}
        if self.tree:
            told["tree"] = "auto"
        if self.method == "early_exit":
            told["exit_layer"] = _exit_layer(target)
        return told


WAYS = (  # the most telling first, as time may run out
    Way(PLAIN, "none", 0),
    Way("draft_model", "draft_model", 5, model="draft"),
    Way("eagle3", "eagle", 5, model="eagle3"),
    Way("eagle3 tree", "eagle", 60, tree=True, model="eagle3"),
    Way("medusa tree", "medusa", len(PUBLISHED_TREE), tree=True, model="medusa"),
    Way("draft_model tree", "draft_model", 24, tree=True, model="draft"),
    Way("early_exit", "early_exit", 5),
    Way("ngram+draft_model", "ngram+draft_model", 5, model="draft"),
)


def draft_vocab(target: Shape) -> int:
    """Ids of the EAGLE-3 head: as published, or a quarter of a smaller target's."""
    return min(EAGLE3_VOCAB, target.vocab // 4)


def _exit_layer(target: Shape) -> int:
    return max(1, target.layers // 4)


def round_bytes(way: Way, target: Shape, draft: Shape) -> dict[str, int]:
    """Bytes of weights that a round reads if each pass reads them once: the target's, and what drafting adds.

    `passes` are the draft's one after another; `a_pass` is what one reads, `once` what drafting reads once a round.
    Embeddings are left out (a few rows are read), and so are keys and values.
    """
    found = {"target": _bytes(_without_embedding(target)), "passes": 0, "a_pass": 0, "once": 0}
    levels = TreeShape().depth(way.guesses) if way.tree else way.guesses
    if way.model == "draft":  # lookup, where it is mixed in, reads no weights
        found |= {"passes": levels, "a_pass": _bytes(_without_embedding(draft))}
    elif way.model == "eagle3":
        tensors = eagle3_tensors(target, draft_vocab(target))
        joined = tensors.pop("fc.weight")
        found |= {"passes": levels, "a_pass": _bytes(tensors), "once": _bytes({"fc.weight": joined})}
    elif way.model == "medusa":
        heads = min(MEDUSA_HEADS, max(map(len, PUBLISHED_TREE[: way.guesses])))  # those that the tree asks
        found |= {"passes": 1, "a_pass": _bytes(medusa_tensors(target, heads))}
    elif way.method == "early_exit":
        left_out = tuple(f"model.layers.{layer}." for layer in range(_exit_layer(target), target.layers))
        kept = {name: shape for name, shape in _without_embedding(target).items() if not name.startswith(left_out)}
        found |= {"passes": levels, "a_pass": _bytes(kept)}
    found["all"] = found["target"] + found["once"] + found["passes"] * found["a_pass"]
    return found


def _without_embedding(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {name: sizes for name, sizes in shape.tensors().items() if name != "model.embed_tokens.weight"}


def _bytes(tensors: dict[str, tuple[int, ...]]) -> int:
    return num_bytes(tensors, DTYPE)


def cell_of(way: Way, raw: dict[str, Any], read: int, bytes_per_second: float) -> dict[str, Any]:
    """Work out a round's time from a cell's stretches; the first of them warmed up and does not count."""
    stretches = raw["stretches"][1:]
    each = [1e3 * one["seconds"] / one["rounds"] for one in stretches]
    seconds, rounds = (sum(one[name] for one in stretches) for name in ("seconds", "rounds"))
    drafted, accepted, tokens = (sum(one[name] for one in stretches) for name in ("drafted", "accepted", "tokens"))
    ms, floor = median(each), 1e3 * read / bytes_per_second
    return {
        **raw,
        "way": way.name,
        "ms_a_round": ms,
        "rounds_per_second": 1e3 / ms,
        "tokens_per_second": None if way.random else tokens / seconds,
        "tokens_a_round": tokens / rounds / raw["rows"],
        "guesses_a_round": drafted / rounds / raw["rows"],
        "accepted": accepted / drafted if drafted else None,
        "floor_ms": floor,
        "share_of_floor": floor / ms,
        "runs": _runs(stretches),
    }


def _runs(stretches: list[dict[str, Any]]) -> str:
    """Say how rounds were started."""
    replayed = [one["replays"] == one["rounds"] for one in stretches]
    if all(replayed):
        alone = not any(one["host_seconds"] for one in stretches)
        return "one graph" if alone else "guesses eager, then one graph"
    return "partly eager" if any(one["replays"] for one in stretches) else "eager"


def methods_table(ways: list[dict[str, Any]], cells: list[dict[str, Any]], bytes_per_second: float) -> Table:
    """Lay out each cell with its floor, its way's start and its text."""
    title = f"Rounds, median; floor: weights read once a pass at {bytes_per_second / 1e9:.0f} GB/s"
    table = Table(title=title, title_justify="left")
    left = ("way", "runs", "text parts at")
    for name in ("way", "rows", "ms/round", "floor", "share", "rounds/s", "tok/s", "tok/round", "accepted", "runs",
                 "load s", "capture s", "text parts at"):  # fmt: skip
        table.add_column(name, justify="left" if name in left else "right")
    known = {way["way"]: way for way in ways}
    for cell in cells:
        way = known.get(cell["way"], {})
        start = way.get("start_up", {})
        rate, share = cell["tokens_per_second"], cell["accepted"]
        table.add_row(
            cell["way"],
            str(cell["rows"]),
            f"[bold]{cell['ms_a_round']:.2f}[/bold]",
            f"{cell['floor_ms']:.2f}",
            f"{cell['share_of_floor']:.0%}",
            f"{cell['rounds_per_second']:.1f}",
            "-" if rate is None else f"{rate:.1f}",
            f"{cell['tokens_a_round']:.2f}",
            "-" if share is None else f"{share:.0%}",
            cell["runs"],
            *("-" if name not in start else f"{start[name]:.1f}" for name in ("load", "capture")),
            _parting(way),
        )
    return table


def _parting(way: dict[str, Any]) -> str:
    """Say where a way's texts leave the plain ones."""
    if "parts_at" not in way:
        return "not compared"
    parted = [at for at in way["parts_at"] if at is not None]
    return f"{', '.join(map(str, parted))} ({len(parted)} of {len(way['parts_at'])})" if parted else "nowhere"
