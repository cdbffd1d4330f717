"""Why acceptance or speed is poor: what the files show, then what a run shows, the worst first."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.advice.evidence import Agreement, Evidence, agreement_of, examine
from outrider.advice.file_checks import FileCase, check_files, named_layers
from outrider.advice.findings import Finding, Severity, by_harm
from outrider.advice.footprint import model_footprint
from outrider.advice.run_checks import check_run
from outrider.advice.sources import HeadSource, head_source, model_source
from outrider.config import Method
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.model.head_files import head_folder
from outrider.samples import SAMPLE_PROMPTS
from outrider.sampling.params import SamplingParams
from outrider.setup import resolve_device, speculation_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.config import SpeculationConfig

__all__ = ["Diagnosis", "diagnose"]

ENDING = ("vocabulary_mismatch", "head_mismatch", "head_layers")  # of the severe ones: the engine would not start
GOOD_ENOUGH = 0.6  # first guesses of a head that agree so often: its layers and norms are right


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        target, draft: Their names; no draft where nothing drafts with weights.
        method: What drafts.
        findings: The worst first.
        evidence: What was measured; None where nothing was.
        notes: What was left out, and why.
    """

    target: str
    draft: str | None
    method: str
    findings: tuple[Finding, ...]
    evidence: Evidence | None
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that costs speed."""
        return not any(finding.harmful for finding in self.findings)


def diagnose(
    arguments: dict[str, Any],
    prompts: Callable[[LLM], list[Any]] | None = None,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    measure: bool = True,
) -> Diagnosis:
    """Examine a target and what drafts for it.

    Args:
        arguments: What `LLM` would be given.
        prompts: Gives what `LLM.generate` takes, for the loaded target; None: built-in texts.
        max_tokens: Tokens of each text.
        temperature: At which to generate.
        measure: Load the pair and run it; False looks at the files alone.

    Raises:
        ConfigError: Nothing drafts, or a setting is out of range.
        ModelLoadError: A model is missing or broken.
    """
    speculation = speculation_of(arguments)
    if not speculation.num_speculative_tokens or speculation.methods == (Method.NONE,):
        raise ConfigError("there is no drafter to examine: name a draft (--speculative-model) or a method")
    case = _case(arguments, speculation)
    found = check_files(case)
    draft = case.draft or case.head
    how = case.target.name, draft.name if draft else None, speculation.method
    stops = [one.code for one in found if one.severity is Severity.SEVERE and one.code in ENDING]
    if stops or not measure:
        why = f"not measured: with {stops[0]} the engine does not start" if stops else "not measured, as asked"
        return Diagnosis(*how, tuple(by_harm(found)), None, (why, *case.target.notes))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0, ignore_eos=False)
    evidence = _measured(arguments, speculation, case.head, prompts or _built_in, params)
    notes = (*case.target.notes, *_disturbed(evidence))
    return Diagnosis(*how, tuple(by_harm(found + check_run(evidence))), evidence, notes)


def _disturbed(evidence: Evidence) -> list[str]:
    """Tell where other programs had the cores too: then all times are rough."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= evidence.cores + 1:
        return []
    return [f"the machine was busy (load {load:.1f} on {evidence.cores} cores): times are rough, agreement is not"]


def _case(arguments: dict[str, Any], speculation: SpeculationConfig) -> FileCase:
    """Read the files of target and draft."""
    device = resolve_device(arguments.get("device"))
    dtype = arguments.get("dtype")
    target = model_source(arguments.get("model"), arguments.get("revision"))
    size = model_footprint(target, dtype=dtype, device=device, quantization=arguments.get("quantization"))
    length = arguments.get("max_model_len") or size.context_length
    case = FileCase(target, size, length=length, crossing=speculation.cross_vocabulary != "off")
    if speculation.drafts_with_model:
        draft = model_source(speculation.model)
        kind = speculation.draft_quantization
        small = model_footprint(draft, dtype=arguments.get("draft_dtype") or dtype, device=device, quantization=kind)
        return replace(case, draft=draft, draft_size=small, method=Method.DRAFT_MODEL)
    heads = [method for method in speculation.methods if method.takes_model]
    return replace(case, head=head_source(speculation.model), method=heads[0]) if heads else case


def _built_in(llm: LLM) -> list[Any]:
    """Short texts of several kinds; single tokens where the target has no tokenizer."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return [[token] for token in range(1, min(4, llm.loaded.vocab_size))]
    if getattr(tokenizer, "chat_template", None):
        return [llm.render([{"role": "user", "content": text}]) for text in SAMPLE_PROMPTS]
    return list(SAMPLE_PROMPTS)


# --- runs


def _measured(
    arguments: dict[str, Any],
    speculation: SpeculationConfig,
    head: HeadSource | None,
    prompts: Callable[[LLM], list[Any]],
    params: SamplingParams,
) -> Evidence:
    with LLM(**arguments) as llm:
        if llm.engine.drafter is None:
            raise ConfigError("the draft could not be loaded (see the warning), so there is nothing to examine")
        evidence = examine(llm, prompts(llm), params)
    if speculation.draft_quantization is not None:
        plain = arguments | {"draft_quantization": None}
        evidence = replace(evidence, unquantised=_agreement(plain, prompts, params))
    first = evidence.agreement.by_position[:1]
    if head is not None and Method.EAGLE in speculation.methods and (not first or first[0] < GOOD_ENOUGH):
        evidence = replace(evidence, variants=_variants(arguments, speculation.model, head, prompts, params))
    return evidence


def _agreement(arguments: dict[str, Any], prompts: Callable[[LLM], list[Any]], params: SamplingParams) -> Agreement:
    with LLM(**arguments) as llm:
        length = min(llm.engine.speculation.num_speculative_tokens, llm.engine.longest_draft)
        return agreement_of(llm.generate(prompts(llm), params.but(speculation=length), progress=False))


def _variants(
    arguments: dict[str, Any],
    source: str | Path,
    head: HeadSource,
    prompts: Callable[[LLM], list[Any]],
    params: SamplingParams,
) -> dict[str, Agreement]:
    """Try a head with the layers and norms that other publishers' conventions would give it."""
    target = model_source(arguments.get("model"), arguments.get("revision"))
    layers = int(target.config.get_text_config().num_hidden_layers)
    folder, found = head_folder(source), {}
    for name, change in _changes(head, layers).items():
        with tempfile.TemporaryDirectory(prefix="outrider-doctor-") as place:
            copy = _with_config(folder, Path(place), head.config, change)
            tried = arguments | {"speculative_model": str(copy), "method": str(Method.EAGLE)}
            found[name] = _agreement(tried, prompts, params)
    return found


def _changes(head: HeadSource, layers: int) -> dict[str, dict[str, Any]]:
    """What to change, by what to call it."""
    if not any(one.name.endswith("hidden_norm.weight") for one in head.tensors):
        return {}  # of EAGLE-1 and 2 nothing is left open
    usual = [2, layers // 2, layers - 3]
    now = named_layers(head.config) or usual
    sets = {tuple(usual), tuple(one - 1 for one in now), tuple(one + 1 for one in now)} - {tuple(now)}
    key = "eagle_aux_hidden_state_layer_ids"
    changes: dict[str, dict[str, Any]] = {
        f"{key} {list(one)}": {key: list(one)} for one in sorted(sets) if min(one) >= 0 and max(one) <= layers
    }
    flag = not {**(head.config.get("eagle_config") or {}), **head.config}.get("norm_before_residual", False)
    return changes | {f"norm_before_residual {str(flag).lower()}": {"norm_before_residual": flag}}


def _with_config(folder: Path, place: Path, config: dict[str, Any], change: dict[str, Any]) -> Path:
    """The same head with another config: its other files are linked."""
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json":
            (place / file.name).symlink_to(file.resolve())
    (place / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    return place
