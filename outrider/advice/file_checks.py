"""Faults of a pair that its files show: each check looks at one thing, and loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.advice.findings import Finding, Severity
from outrider.advice.prediction import Drafting, Machine, best_length
from outrider.advice.words import Words, overlap
from outrider.config import Method

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.advice.footprint import ModelFootprint
    from outrider.advice.sources import HeadSource, ModelSource

__all__ = ["FILE_CHECKS", "FileCase", "check_files", "named_layers"]

FEW_BITS = 4.0  # of a weight, on average: below this, small models forget much
LARGE_DRAFT = 0.35  # of the target's bytes: guides say 5 to 20 %
GOOD_AGREEMENT = 0.8
_SAMPLE = ({"role": "user", "content": "What is the capital of France?"},)
_SAME_FAMILY = "use a draft that was trained with the target's tokenizer (`outrider plan` lists known ones)"


@dataclass(frozen=True)
class FileCase:
    """A pair as its files describe it.

    Attributes:
        target, draft: What the files say; no draft where none is a model.
        target_size, draft_size: What they take and read.
        head: A trained head's files, where one drafts.
        method: That it drafts with.
        length: Tokens of the longest text that will be asked for.
        crossing: Whether guesses may cross between vocabularies.
    """

    target: ModelSource
    target_size: ModelFootprint
    draft: ModelSource | None = None
    draft_size: ModelFootprint | None = None
    head: HeadSource | None = None
    method: Method = Method.NONE
    length: int = 0
    crossing: bool = False

    @property
    def words(self) -> tuple[Words, Words] | None:
        """Both vocabularies; None where one is not known."""
        if self.draft is None or self.target.words is None or self.draft.words is None:
            return None
        return self.target.words, self.draft.words


def check_files(case: FileCase) -> list[Finding]:
    """Run every check."""
    return [finding for check in FILE_CHECKS for finding in check(case)]


def vocabulary(case: FileCase) -> list[Finding]:
    """Ids that mean one thing to the target and another to the draft."""
    if case.words is None:
        return []
    found = overlap(*case.words)
    if found.fits:
        return []
    severity = Severity.MODERATE if case.crossing else Severity.SEVERE
    return [
        Finding(
            "vocabulary_mismatch",
            severity,
            f"{found.clashing} ids mean another token to the draft than to the target",
            _SAME_FAMILY + ("" if case.crossing else ", or let guesses cross with --cross-vocabulary auto"),
            {
                "clashing_ids": found.clashing,
                "same_share": round(found.share, 4),
                "same_strings": round(found.shared_strings, 4),
            },
            harm=1 - found.share,
        )
    ]


def special_tokens(case: FileCase) -> list[Finding]:
    """Beginnings, ends and added tokens that the two know by different ids."""
    if case.words is None:
        return []
    target, draft = case.words
    differing = {
        name: pair
        for name, pair in overlap(target, draft).special.items()
        if name in ("bos", "eos") and None not in pair
    }
    missing = sorted(token for token, index in target.added.items() if draft.ids.get(token) != index)
    spoken = [token for token in missing if target.chat_template and token in target.chat_template]
    if not differing and not missing:
        return []
    evidence: dict[str, Any] = {name: f"target {one}, draft {other}" for name, (one, other) in differing.items()}
    if missing:
        evidence |= {"added_tokens_unknown_to_the_draft": len(missing), "such_as": ", ".join((spoken or missing)[:4])}
    return [
        Finding(
            "special_tokens",
            Severity.MODERATE if differing or spoken else Severity.SLIGHT,
            "the draft knows special tokens of the target by other ids, or not at all: it does not see where a text "
            "or a turn begins and ends",
            "use the draft of the same release (instruct with instruct), with the target's special tokens",
            evidence,
            harm=0.1 if differing or spoken else 0.0,
        )
    ]


def chat_template(case: FileCase) -> list[Finding]:
    """Prompts are written by the target's template; a draft that was trained with another is out of its depth."""
    if case.words is None or case.words[0].chat_template is None:
        return []
    target, draft = case.words
    if draft.chat_template is None:
        what, evidence = "the target has a chat template and the draft has none: it is no instruct model", "draft: none"
    else:
        one, other = (_rendered(words) for words in (target, draft))
        if one == other:
            return []
        what, evidence = "target and draft write the same conversation in different ways", _first_difference(one, other)
    return [
        Finding(
            "chat_template",
            Severity.MODERATE,
            what,
            "use an instruct draft of the target's family; if only the template's file differs, copy the target's",
            {"first_difference": evidence},
            harm=0.15,
        )
    ]


def draft_context(case: FileCase) -> list[Finding]:
    """A draft that ends before the texts do."""
    reach, name = None, ""
    if case.draft_size is not None:
        reach, name = case.draft_size.context_length, case.draft_size.name
    elif case.head is not None and case.method is not Method.MEDUSA:
        layers = case.head.config.get("transformer_layer_config") or case.head.config
        reach, name = layers.get("max_position_embeddings"), case.head.name
    if reach is None or reach >= case.length:
        return []
    beyond = 1 - reach / case.length
    return [
        Finding(
            "draft_context",
            Severity.MODERATE,
            f"{name} was made for {reach} tokens and texts may have {case.length}: beyond that nothing is guessed",
            f"ask for shorter texts (--max-model-len {reach}), use a draft with a longer context, or add lookup "
            "(--method ngram+draft_model)",
            {"draft_context": reach, "longest_text": case.length},
            harm=beyond,
        )
    ]


def stored_bits(case: FileCase) -> list[Finding]:
    """A draft whose weights were stored in too few bits."""
    if case.draft is None or case.draft_size is None or not case.draft.stored_bytes:
        return []
    model = case.draft_size.runner.model
    count = sum(one.numel() for one in {id(one): one for one in model.parameters()}.values())
    bits = 8 * case.draft.stored_bytes / count
    if bits >= FEW_BITS:
        return []
    return [
        Finding(
            "draft_quantised",
            Severity.MODERATE,
            f"the draft's weights are stored in {bits:.1f} bits each: small models lose much of what they know",
            "use a version of the draft in 4 bits or more (Q4_K_M, Q8_0, bf16); it is small anyway",
            {"bits_a_weight": round(bits, 2)},
            harm=0.2,
        )
    ]


def size_ratio(case: FileCase) -> list[Finding]:
    """A draft that reads nearly as much as the target does."""
    if case.draft_size is None:
        return []
    target, draft = case.target_size.passed, case.draft_size.passed
    ratio = draft.bytes_read(1, 1) / target.bytes_read(1, 1)
    if ratio <= LARGE_DRAFT:
        return []
    length, gain = best_length(GOOD_AGREEMENT, target, Drafting(draft), 1, Machine(1.0))
    return [
        Finding(
            "draft_too_large",
            Severity.SEVERE if length == 0 or gain < 1.1 else Severity.MODERATE,
            f"a pass of the draft reads {ratio:.0%} of what the target's reads",
            "use a draft of 5 to 20 % of the target's size, or a head (eagle, medusa)",
            {"byte_ratio": round(ratio, 3), f"best_speedup_at_{GOOD_AGREEMENT:.0%}": round(gain, 2)},
            harm=min(1.0, ratio),
        )
    ]


def head_fit(case: FileCase) -> list[Finding]:
    """A head that was trained on another target: hidden states of another width, or layers that are not there."""
    if case.head is None:
        return []
    text = case.target_size.runner.model.config.get_text_config()
    hidden, layers = int(text.hidden_size), int(text.num_hidden_layers)
    shapes = {one.name.removeprefix("model."): one.shape for one in case.head.tensors}
    if case.method is Method.MEDUSA:
        made_for = next((shape[-1] for shape in shapes.values() if len(shape) == 2), hidden)
        return [] if made_for == hidden else [_other_target(made_for, hidden)]
    named = named_layers(case.head.config)
    wrong = [one for one in named if not 0 <= one <= layers]
    if wrong:
        return [
            Finding(
                "head_layers",
                Severity.SEVERE,
                f"the head reads hidden states {wrong}, and the target has {layers} layers",
                "use a head that was trained for this target, or correct eagle_aux_hidden_state_layer_ids",
                {"reads": str(named), "target_layers": layers},
                harm=1.0,
            )
        ]
    joint = next((shapes[name] for name in ("fc.weight", "fusion_fc.weight") if name in shapes), None)
    if joint is None or case.method is not Method.EAGLE:
        return []
    third = any(name.endswith("hidden_norm.weight") for name in shapes)
    width: float = joint[1] / (len(named) or 3) if third else joint[1] - joint[0]
    return [] if width == hidden else [_other_target(width, hidden)]


def head_norm(case: FileCase) -> list[Finding]:
    """An EAGLE-3 head without the norm before its matrix to the vocabulary."""
    if case.head is None or case.method is not Method.EAGLE:
        return []
    names = {one.name.removeprefix("model.") for one in case.head.tensors}
    third = any(name.endswith("hidden_norm.weight") for name in names)
    if not third or names & {"norm.weight", "pre_lm_head_layernorm.weight"}:
        return []
    return [
        Finding(
            "head_norm",
            Severity.MODERATE,
            "the head brings no norm before its matrix to the vocabulary: the target's serves, which it may not fit",
            "restore norm.weight from the head's training checkpoint",
            {"missing": "norm.weight"},
            harm=0.3,
        )
    ]


def _other_target(width: float, hidden: int) -> Finding:
    return Finding(
        "head_mismatch",
        Severity.SEVERE,
        f"the head was made for hidden states of {width:g} numbers, and the target has {hidden}",
        "use a head that was trained for this target",
        {"head_reads": width, "target_hidden": hidden},
        harm=1.0,
    )


def named_layers(config: dict[str, Any]) -> list[int]:
    """Hidden states that an EAGLE-3 head's config names, numbered by layers' inputs."""
    nested = config.get("eagle_config") or {}
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    return [int(one) for one in listed or [one + 1 for one in nested.get("eagle_aux_hidden_state_layer_ids") or ()]]


def _rendered(words: Words) -> str:
    """A short conversation as the template writes it; the template itself where it cannot be run."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {index: token for token, index in words.ids.items()}
    special = {f"{name}_token": names.get(index, "") for name, index in words.special.items() if index is not None}
    how: dict[str, Any] = {"chat_template": words.chat_template, "add_generation_prompt": True, **special}
    try:
        written: Any = render_jinja_template([list(_SAMPLE)], **how)
        return str(written[0][0])
    except Exception:  # noqa: BLE001 - a template may do anything; its text is then compared
        return words.chat_template or ""


def _first_difference(one: str, other: str) -> str:
    place = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return f"{one[place : place + 24]!r} by the target, {other[place : place + 24]!r} by the draft"


FILE_CHECKS: tuple[Callable[[FileCase], list[Finding]], ...] = (
    vocabulary,
    special_tokens,
    chat_template,
    draft_context,
    stored_bits,
    size_ratio,
    head_fit,
    head_norm,
)
