"""Faults that only a run shows: each check looks at one thing in the evidence, and computes nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outrider.advice.findings import Finding, Severity
from outrider.advice.prediction import speedup

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.advice.evidence import Agreement, Evidence

__all__ = ["RUN_CHECKS", "best_speedup", "check_run", "speedup_of"]

ENOUGH = 24  # guesses: fewer tell nothing
LITTLE, VERY_LITTLE = 0.35, 0.15  # agreement of first guesses
TEMPERATURE_DROP = 0.15  # of agreement
QUANTISATION_DROP = 0.05
DRIFT, STILL = 0.25, 0.6  # of agreement: what is lost at least, and kept at most
BETTER_HEAD = 0.15
GAIN = 1.1  # what another draft length must bring to be worth a word
WORTH = 1.05  # speedup that is worth having
LARGE_COST = 0.35  # of a target's pass: a draft's
SHORT_TEXT = 16  # tokens
HOST_SHARE = {"cuda": 0.5, "cpu": 0.65}  # of a round; where the models run on the host too, noise hits both
MOST = 64
SURE = 3.0  # standard errors


def check_run(evidence: Evidence) -> list[Finding]:
    """Run every check."""
    return [finding for check in RUN_CHECKS for finding in check(evidence)]


def speedup_of(evidence: Evidence, rows: int, length: int) -> float:
    """Speedup of rounds of `length` guesses, by the agreement that was measured and what rounds cost."""
    rounds = evidence.timings.rounds
    return speedup(evidence.agreement.tokens(length), rounds[rows, 0], rounds[rows, length], 0.0)


def best_speedup(evidence: Evidence, rows: int) -> tuple[int, float]:
    """The draft length with the highest speedup at so many rows, and that speedup."""
    seen = len(evidence.agreement.reached)
    most = seen if seen < evidence.num_tokens else MOST  # heads may have no more guesses than that
    lengths = sorted(length for count, length in evidence.timings.rounds if count == rows and length <= most)
    return max(((length, speedup_of(evidence, rows, length)) for length in lengths), key=lambda one: (one[1], -one[0]))


def low_agreement(evidence: Evidence) -> list[Finding]:
    """First guesses that are hardly ever right."""
    first = _first(evidence.agreement)
    if not evidence.guesses_by_model:
        return _lookup(evidence)
    if not _enough(evidence.agreement) or first >= LITTLE:
        return []
    return [
        Finding(
            "low_agreement",
            Severity.SEVERE if first < VERY_LITTLE else Severity.MODERATE,
            f"the first guess of a round agrees in {first:.0%} of all cases",
            "use a draft of the target's family, or one that was trained on such texts; lookup (--method ngram) costs "
            "nothing where text repeats",
            {"first_guess": round(first, 3), **_shown(evidence.agreement)},
            harm=1 - first,
        )
    ]


def _lookup(evidence: Evidence) -> list[Finding]:
    per_round = evidence.agreement.tokens(evidence.num_tokens)
    if _enough(evidence.agreement) and per_round >= 1.2:
        return []
    return [
        Finding(
            "little_repeats",
            Severity.SLIGHT,
            "these texts hardly repeat anything, so lookup finds little; it rests by itself meanwhile",
            "name a draft model or a head (`outrider plan` lists known ones), or a corpus (--method suffix "
            "--suffix-corpus FILE)",
            {"guesses": evidence.agreement.drafted, "tokens_a_round": round(per_round, 2)},
        )
    ]


def temperature(evidence: Evidence) -> list[Finding]:
    """Chance that takes the draws of draft and target apart."""
    if evidence.greedy is None or not _enough(evidence.greedy) or not _enough(evidence.agreement):
        return []
    drop = evidence.greedy.share - evidence.agreement.share
    if drop < TEMPERATURE_DROP:
        return []
    return [
        Finding(
            "temperature",
            Severity.MODERATE,
            f"at temperature {evidence.temperature:g} the draft agrees {drop:.0%} less often than greedily",
            "lower the temperature, or filter (--top-p 0.9, --min-p 0.05): the flatter the target, the less can be "
            "guessed",
            {"at_this_temperature": round(evidence.agreement.share, 3), "greedy": round(evidence.greedy.share, 3)},
            harm=drop,
        )
    ]


def quantised_too_far(evidence: Evidence) -> list[Finding]:
    """A draft that forgot in few bits what it knew in its own."""
    whole = evidence.unquantised
    if whole is None or not _enough(whole):
        return []
    drop = whole.share - evidence.agreement.share
    if drop < QUANTISATION_DROP:
        return []
    return [
        Finding(
            "draft_quantised",
            Severity.MODERATE if drop < 3 * QUANTISATION_DROP else Severity.SEVERE,
            f"quantised, the draft agrees {drop:.0%} less often than as it was stored",
            "leave --draft-quantization off, or use more bits (int8, fp8)",
            {"quantised": round(evidence.agreement.share, 3), "as_stored": round(whole.share, 3)},
            harm=drop,
        )
    ]


def draft_cost(evidence: Evidence) -> list[Finding]:
    """A draft whose pass takes nearly as long as the target's."""
    timings = evidence.timings
    if timings.draft_pass is None or timings.target_pass <= 0:
        return []
    ratio = timings.draft_pass / timings.target_pass
    if ratio < LARGE_COST:
        return []
    length, gain = best_speedup(evidence, 1)
    return [
        Finding(
            "draft_too_large",
            Severity.SEVERE if gain < GAIN else Severity.MODERATE,
            f"a guess costs {ratio:.0%} of a round without guesses",
            "use a smaller draft, a head, or fewer of its numbers (--draft-quantization, --draft-vocab-size)",
            {
                "target_ms": round(timings.target_pass * 1e3, 3), "guess_ms": round(timings.draft_pass * 1e3, 3),
                "cost_ratio": round(ratio, 3), "best_length": length, "best_speedup": round(gain, 2),
            },
            harm=min(1.0, ratio),
        )
    ]  # fmt: skip


def draft_length(evidence: Evidence) -> list[Finding]:
    """Another number of guesses would be faster."""
    if not evidence.guesses_by_model or not _enough(evidence.agreement):
        return []
    if (evidence.rows, evidence.num_tokens) not in evidence.timings.rounds:
        return []
    now = speedup_of(evidence, evidence.rows, evidence.num_tokens)
    best, gain = best_speedup(evidence, evidence.rows)
    if best == evidence.num_tokens or gain < GAIN * now:
        return []
    longer = best > evidence.num_tokens
    word = "short" if longer else "long"
    remedy = f"--num-speculative-tokens {best}" if best else "--method none: no number of guesses pays here"
    return [
        Finding(
            f"draft_length_too_{word}",
            Severity.MODERATE,
            f"{evidence.num_tokens} guesses a round are too {'few' if longer else 'many'}: {best} would be faster",
            remedy,
            {
                "configured": evidence.num_tokens, "speedup_now": round(now, 2), "best": best,
                "speedup_best": round(gain, 2), **_shown(evidence.agreement),
            },
            harm=1 - now / gain,
        )
    ]  # fmt: skip


def output_too_short(evidence: Evidence) -> list[Finding]:
    """Texts that end before guessing can help."""
    if evidence.mean_tokens >= SHORT_TEXT:
        return []
    return [
        Finding(
            "output_too_short",
            Severity.MODERATE,
            f"a text has {evidence.mean_tokens:.0f} tokens on average: most of its time goes into reading the prompt",
            "speculation shortens generation alone; for short answers look at prefix caching, or leave it off",
            {"tokens": round(evidence.mean_tokens, 1), "time_to_first_token": f"{evidence.timings.reading_share:.0%}"},
            harm=evidence.timings.reading_share,
        )
    ]


def batch_too_large(evidence: Evidence) -> list[Finding]:
    """So many texts together that a wider pass costs what it brings."""
    if evidence.rows < 2 or not _enough(evidence.agreement) or (evidence.rows, 0) not in evidence.timings.rounds:
        return []
    alone, together = (best_speedup(evidence, rows)[1] for rows in (1, evidence.rows))
    if alone < GAIN or together >= WORTH:
        return []
    rounds = evidence.timings.rounds
    width = min(evidence.num_tokens, max(length for _, length in rounds))
    wider = {rows: rounds[rows, width] / rounds[rows, 0] for rows in (1, evidence.rows)}
    return [
        Finding(
            "batch_too_large",
            Severity.MODERATE,
            f"with {evidence.rows} texts together verification is no longer free: a round of {width} guesses takes "
            f"{wider[evidence.rows]:.1f} times a plain one, alone {wider[1]:.1f} times",
            "fewer texts together (--max-num-seqs), or shorter drafts; the engine leaves guesses out by itself there",
            {"texts": evidence.rows, "speedup_alone": round(alone, 2), "speedup_together": round(together, 2)},
            harm=1 - together / alone,
        )
    ]


def context_drift(evidence: Evidence) -> list[Finding]:
    """A draft that loses its way further on in the texts."""
    found = evidence.agreement
    drop = found.early - found.late
    counts = min(found.early_count, found.late_count)
    if not evidence.guesses_by_model or counts < ENOUGH or drop < SURE * _error(found):
        return []
    if drop < DRIFT or found.late > STILL * found.early:
        return []
    return [
        Finding(
            "context_drift",
            Severity.MODERATE,
            f"further on in the texts the draft agrees {drop:.0%} less often: it was trained for shorter ones",
            "use a draft that was trained for such lengths, or shorter texts; a rope scaling of the target's that the "
            "draft lacks does this too",
            {"first_half": round(found.early, 3), "second_half": round(found.late, 3)},
            harm=drop,
        )
    ]


def head_variants(evidence: Evidence) -> list[Finding]:
    """A head that would agree more often with other hidden states, or another norm."""
    if not evidence.variants:
        return []
    name, best = max(evidence.variants.items(), key=lambda one: one[1].share)
    gain = best.share - evidence.agreement.share
    if gain < BETTER_HEAD or not _enough(best):
        return []
    layers = name.startswith("eagle_aux_hidden_state_layer_ids")
    return [
        Finding(
            "head_layers" if layers else "head_norm",
            Severity.SEVERE,
            f"with {name} the head agrees {gain:.0%} more often: its config names the wrong "
            + ("hidden states" if layers else "norm"),
            f"set {name} at the top of the head's config.json",
            {"as_configured": round(evidence.agreement.share, 3), name: round(best.share, 3)},
            harm=gain,
        )
    ]


def slow_path(evidence: Evidence) -> list[Finding]:
    """Compiled rounds or kernels that are missing."""
    if not evidence.slow_paths:
        return []
    card = evidence.device == "cuda"
    return [
        Finding(
            "compile_missing",
            Severity.SEVERE if card else Severity.SLIGHT,
            "; ".join(evidence.slow_paths),
            "install triton and use a model of the usual structure (Llama, Mistral, Qwen)" if card else
            "nothing to do beside using a model of the usual structure (Llama, Mistral, Qwen)",
            {"device": evidence.device},
            harm=0.5 if card else 0.0,
        )
    ]  # fmt: skip


def host_bound(evidence: Evidence) -> list[Finding]:
    """Rounds that wait for the host."""
    timings = evidence.timings
    models = timings.models_seconds
    if models is None or timings.round_seconds <= 0:
        return []
    share = 1 - models / timings.round_seconds
    if share < HOST_SHARE[evidence.device]:
        return []
    return [
        Finding(
            "host_bound",
            Severity.MODERATE,
            f"{share:.0%} of a round is spent outside the models, on the host",
            "end other programs on the host, give it more cores, or use a larger model or batch: a tiny model's round "
            "is over before the host is",
            {"round_ms": round(timings.round_seconds * 1e3, 3), "models_ms": round(models * 1e3, 3)},
            harm=share,
        )
    ]


def threads(evidence: Evidence) -> list[Finding]:
    """More threads than cores."""
    if evidence.device != "cpu" or evidence.threads <= evidence.cores:
        return []
    return [
        Finding(
            "threads_oversubscribed",
            Severity.SEVERE if evidence.threads >= 2 * evidence.cores else Severity.MODERATE,
            f"torch computes with {evidence.threads} threads on {evidence.cores} usable cores: they starve each other",
            f"--threads {evidence.cores} (or OMP_NUM_THREADS={evidence.cores})",
            {"threads": evidence.threads, "cores": evidence.cores},
            harm=1 - evidence.cores / evidence.threads,
        )
    ]


RUN_CHECKS: tuple[Callable[[Evidence], list[Finding]], ...] = (
    low_agreement, temperature, quantised_too_far, draft_cost, draft_length, output_too_short, batch_too_large,
    context_drift, head_variants, slow_path, host_bound, threads,
)  # fmt: skip


def _enough(agreement: Agreement) -> bool:
    return sum(agreement.reached) >= ENOUGH


def _first(agreement: Agreement) -> float:
    return agreement.by_position[0] if agreement.by_position else 0.0


def _error(found: Agreement) -> float:
    """Standard error of the difference of both halves."""
    parts = ((found.early, found.early_count), (found.late, found.late_count))
    return math.sqrt(sum(max(share * (1 - share), 0.01) / max(1, count) for share, count in parts))


def _shown(agreement: Agreement) -> dict[str, str]:
    return {"by_position": " ".join(f"{one:.2f}" for one in agreement.by_position)}
