"""What a search comes to: the setting to take, how sure that is, and the file that says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.config import Method
from outrider.config_file import written_config
from outrider.tune.prediction import Variant
from outrider.tune.search import WORTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.tune.search import Search

__all__ = ["Verdict", "config_text", "verdict_of"]

NO_DEFAULTS = ("model", "dtype", "device", "quantization", "revision", "max_model_len", "exact", "verification")


@dataclass(frozen=True)
class Verdict:
    """The setting to take.

    Attributes:
        variant: What drafts; method "none" where nothing is worth it.
        length: Guesses a round at most.
        speedups: What was measured with it, by concurrency: median, min, max.
        title: The candidate's; None for plain decoding.
        reason: Why, in a sentence.
    """

    variant: Variant
    length: int
    speedups: dict[str, dict[str, float]]
    title: str | None
    reason: str

    @property
    def worth(self) -> bool:
        """Whether speculation is."""
        return self.title is not None


def verdict_of(search: Search) -> Verdict | None:
    """Choose by what was measured; None where nothing was.

    Of candidates within the noise of the best one, the shortest wins: it costs least where prompts are others.
    """
    found = search.state.measured
    known = {one.title: one for one in search.ranked() if one.title in found}
    if not known:
        return None
    best = max(found[title]["promise"] for title in known)
    if best < WORTH:
        reason = (
            f"speculation is not worth it here: the best setting that was measured is {best:.2f} times as fast as "
            "plain decoding"
        )
        return Verdict(Variant(str(Method.NONE)), 0, {}, None, reason)
    near = [one for one in known.values() if found[one.title]["promise"] >= best - 0.02]
    chosen = min(near, key=lambda one: (one.length, -found[one.title]["promise"]))
    speedups = found[chosen.title]["auto"]
    slow = [together for together, told in speedups.items() if told["median"] < 1]
    over = ", over all concurrencies asked for" if len(speedups) > 1 else ""
    gain = found[chosen.title]["promise"]
    reason = f"{chosen.title} is {gain:.2f} times as fast as plain decoding{over}"
    if slow:
        reason += f", but slower at {' and '.join(slow)} at a time"
    return Verdict(chosen.variant, chosen.length, speedups, chosen.title, reason)


def config_text(verdict: Verdict, base: dict[str, Any], notes: Sequence[str]) -> str:
    """Give the text of `outrider.toml`: what differs from the defaults, and how it came about.

    Args:
        verdict: What was chosen.
        base: Arguments of `LLM` that the search was given.
        notes: Lines of comment.
    """
    values: dict[str, Any] = {name: base[name] for name in NO_DEFAULTS if base.get(name) not in (None, "auto", False)}
    if values.get("verification") == "coupled":
        del values["verification"]
    values["method"] = verdict.variant.method
    if verdict.worth:
        drafts = Variant(verdict.variant.method).method
        values |= {"num_speculative_tokens": verdict.length, "tree": verdict.variant.tree}
        values |= drafting_values(drafts, base)
    return written_config(values, [f"Written by outrider tune {__version__}.", *notes])


def drafting_values(method: str, base: dict[str, Any]) -> dict[str, Any]:
    """Give the drafting settings that belong to a method, of those that were given."""
    from outrider.bench.plan import OWN
    from outrider.config import methods_of

    methods = methods_of(method)
    found: dict[str, Any] = {}
    if any(one.takes_model for one in methods):
        names = ("speculative_model", "draft_dtype", "draft_device", "cross_vocabulary")
        found |= {name: base.get(name) for name in names}
        if found["cross_vocabulary"] == "off":
            del found["cross_vocabulary"]
    found |= {name: base.get(name) for name, owner in OWN.items() if owner in methods}
    if Method.NGRAM in methods:
        usual = {"prompt_lookup_max": 8, "prompt_lookup_min": 1}
        found |= {name: base[name] for name, value in usual.items() if base.get(name, value) != value}
    return found
