"""`outrider verify`: proves that a target's text is the same with a drafter and without."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path  # Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Argument, Option

from outrider.cli.console import FAILED, byte_bar, reported, say, working
from outrider.cli.options import SAMPLING, ModelOptions
from outrider.cli.prompts import read_prompts
from outrider.cli.values import check_writable, one_model
from outrider.config import SpeculationConfig
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.proof.prove import Proof, Target
    from outrider.proof.record import Record
    from outrider.proof.replay import Recall

__all__ = ["VERIFY_EXAMPLES", "VERIFY_HELP", "VerifyOptions", "verify"]

PROOF = "Proof"
PROMPTS = 8  # of the built-in ones

VERIFY_HELP = """Prove that a target's text is the same with a drafter and without.

Each prompt is continued plainly and with guesses, at each temperature, with fixed seeds. Where two texts part, a
referee (the same weights in fp32, by transformers) tells how far both tokens are from being the one to take. What
rounding alone does in the target's dtype is measured first: within that it is a near-tie, beyond it a defect. With
--exact, and in float32 on a CPU, any divergence is a defect.

With --verification rejection or block, sampled texts follow the target's distribution, but are not its own sample.
There each prompt is continued with many seeds (--samples), and the tokens of each position are tested against the
target's distribution; the table tells the smallest difference that would have been found. typical is lossy: refused.
"""

VERIFY_EXAMPLES = """**Examples**

    outrider verify   # the default model, drafting by lookup

    outrider verify TARGET --speculative-model DRAFT --temperature 0,0.7,1 --record proof.json

    outrider verify TARGET -md DRAFT --verification rejection --temperature 1 --samples 20000

    outrider verify --replay proof.json   # the same weights, settings and tokens again?

**Exit codes:** 0 proven as far as tested, 1 a defect, 2 what you gave was wrong or shows nothing, 130 interrupted.
"""


@dataclass(frozen=True)
class VerifyOptions:
    """What to show, on what, and where to keep it."""

    target: Annotated[
        str | None, Argument(metavar="[MODEL]", help="Hub id, folder or GGUF file.", show_default=False)
    ] = None
    temperature: Annotated[
        str, Option(metavar="T,T,...", help="A setting for each; 0 is greedy.", rich_help_panel=SAMPLING)
    ] = "0,1"
    top_p: Annotated[float, Option(help="As in generate.", rich_help_panel=SAMPLING)] = 1.0
    top_k: Annotated[int, Option(help="As in generate.", rich_help_panel=SAMPLING)] = 0
    min_p: Annotated[float, Option(help="As in generate.", rich_help_panel=SAMPLING)] = 0.0
    presence_penalty: Annotated[float, Option(help="As in generate.", rich_help_panel=SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, Option(help="As in generate.", rich_help_panel=SAMPLING)] = 0.0
    repetition_penalty: Annotated[float, Option(help="As in generate.", rich_help_panel=SAMPLING)] = 1.0
    seed: Annotated[int, Option(help="Of the first text; others count up.", rich_help_panel=SAMPLING)] = 0
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help='One prompt; or, as .jsonl, an object with "prompt" or "messages" a line.',
            show_default="built-in ones",
            rich_help_panel=PROOF,
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option(min=1, help="Prompts.", show_default=f"{PROMPTS} built-in ones, all of FILE", rich_help_panel=PROOF),
    ] = None
    max_tokens: Annotated[int, Option("--max-tokens", "-n", min=1, help="Of each text.", rich_help_panel=PROOF)] = 64
    samples: Annotated[
        int, Option(min=100, help="Texts a setting whose distribution is tested.", rich_help_panel=PROOF)
    ] = 2000
    record: Annotated[Path | None, Option(metavar="FILE", help="Write a proof record.", rich_help_panel=PROOF)] = None
    replay: Annotated[
        Path | None,
        Option(metavar="FILE", help="Check a record again; of other options only -m and -md count.",
               rich_help_panel=PROOF),
    ] = None  # fmt: skip
    as_json: Annotated[bool, Option("--json", help="One JSON object instead of the table.", rich_help_panel=PROOF)] = (
        False
    )
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=PROOF)] = False
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.", rich_help_panel=PROOF)] = False

    def settings(self) -> tuple[dict[str, Any], ...]:
        """Give a setting for each temperature, with the other fields that are not at their defaults.

        Raises:
            ConfigError: A temperature is no number.
            InvalidRequestError: A value is out of range.
        """
        names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        shared = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(SamplingParams, name)}
        try:
            temperatures = [float(one) for one in self.temperature.split(",")]
        except ValueError:
            raise ConfigError(f"--temperature must be numbers such as 0,0.7,1, got {self.temperature!r}") from None
        settings = tuple({"temperature": one, **shared} for one in dict.fromkeys(temperatures))
        for one in settings:
            SamplingParams(**one, max_tokens=self.max_tokens, seed=self.seed)
        return settings


def verify(check: VerifyOptions, model: ModelOptions) -> None:
    """Check what needs no model, hash the weights where they are recorded, then generate, compare, judge and tell."""
    with reported(show_traceback=check.traceback):
        model = replace(model, model=one_model(check.target, model.model))
        check_writable("--record", check.record)
        if check.replay is None:
            defects = _Job(check, model.arguments(), model.threads).prove()
        else:
            defects = _replayed(check, model)
    if defects:
        raise typer.Exit(FAILED)


def _replayed(check: VerifyOptions, model: ModelOptions) -> int:
    from outrider.proof.record import read_record

    assert check.replay is not None
    if check.record is not None:
        raise ConfigError("--replay checks a record and --record writes one; give one of them")
    record = read_record(check.replay)
    named = {"model": model.model, "speculative_model": model.speculative_model}
    load = _checked(record.load) | {name: value for name, value in named.items() if value is not None}
    return _Job(check, load, record.machine.threads).replay(record)


def _checked(load: dict[str, Any]) -> dict[str, Any]:
    """Refuse a record's arguments that no option could have given."""
    kinds: dict[str, Any] = get_type_hints(ModelOptions) | {
        "speculative_config": dict | None,
        "kv_cache_bytes": int | None,
    }
    for name, value in load.items():
        if name == "threads" or name not in kinds:
            raise ConfigError(f"the record's settings hold {name!r}, which no option sets; make a new record")
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is not bool):
            raise ConfigError(f"the record has {value!r:.60} for {name}, which cannot be; make a new record")
    return load


class _Job:
    """One run of the command."""

    def __init__(self, check: VerifyOptions, load: dict[str, Any], threads: int | None) -> None:
        from outrider.proof.prove import check_provable, verification_of

        self._check, self._load, self._threads = check, load, threads
        check_provable(verification_of(load), load.get("quantization"), exact=bool(load.get("exact")))

    def prove(self) -> int:
        """Prove, tell, and keep a record if one is wanted; give the number of defects."""
        from outrider.proof.prove import Plan, generated, proved
        from outrider.proof.record import here, written

        check = self._check
        settings = check.settings()
        wanted = None if check.prompts is None else read_prompts(None, None, check.prompts)
        weights = self._hashes() if check.record is not None else {}
        with self._loaded() as llm:
            target = self._target(llm)
            guesses = llm.engine.speculation.num_speculative_tokens
            plan = Plan(settings, check.max_tokens, check.seed, guesses, check.samples)
            prompts = self._prompts(llm, wanted)
            cells = generated(llm, prompts, plan, progress=False if check.quiet else None)
            tokenizer = llm.tokenizer
        self._say("comparing")
        proof = proved(cells, plan, target)
        if check.record is not None:
            machine = here(target)
            load = {**self._load, "dtype": machine.dtype}
            written(check.record, proof, load=load, weights=weights, machine=machine, plan=plan, prompts=prompts)
        self._tell(proof, target, tokenizer)
        return proof.defects

    def replay(self, record: Record) -> int:
        """Check a record again; give the number of defects."""
        from outrider.proof.prove import generated, proved
        from outrider.proof.record import here
        from outrider.proof.replay import check_weights, recalled

        check_weights(record.weights, self._hashes())
        with self._loaded() as llm:
            target = self._target(llm)
            cells = generated(llm, record.prompts, record.plan, progress=False if self._check.quiet else None)
            tokenizer = llm.tokenizer
        differences = record.machine.differences(here(target))
        self._say("comparing")
        proof = proved(cells, record.plan, target)
        recalls = recalled(record, proof, target, same_machine=not differences)
        self._tell(proof, target, tokenizer, recalls, differences)
        return proof.defects + sum(one.defects for one in recalls)

    def _hashes(self) -> dict[str, Any]:
        from outrider.proof.weights import hashed, model_files
        from outrider.setup import speculation_from

        load = self._load
        named = {field.name: load[field.name] for field in fields(SpeculationConfig) if field.name in load}
        given = named | {"model": load.get("speculative_model")}
        speculation = speculation_from(load.get("speculative_config"), **given)
        files = model_files(load.get("model"), load.get("revision"), speculation)
        self._say("hashing the weights")
        with byte_bar("hashing the weights", quiet=self._check.quiet) as advance:
            return hashed(files, advance)

    def _say(self, line: str) -> None:
        """Tell what is being done, unless a progress bar will."""
        if not self._check.quiet and not sys.stderr.isatty():
            say(line)

    def _loaded(self) -> LLM:
        with working(f"loading {self._load.get('model') or 'the default model'}", quiet=self._check.quiet):
            import torch

            from outrider.llm import LLM

            if self._threads is not None:
                torch.set_num_threads(self._threads)
            return LLM(**self._load)

    def _target(self, llm: LLM) -> Target:
        from outrider.proof.prove import Target

        load = self._load
        return Target.of(llm, load.get("model"), load.get("revision"), load.get("quantization"))

    def _prompts(self, llm: LLM, wanted: list[Any] | None) -> list[list[int]]:
        from outrider.proof.prompts import built_in

        count, room = self._check.num_prompts, llm.max_model_len - self._check.max_tokens
        if room < 1:
            raise ConfigError(
                f"--max-tokens {self._check.max_tokens} leaves no room for a prompt: the longest text here is "
                f"{llm.max_model_len} tokens; ask for less"
            )
        if wanted is None:
            return [one[-room:] for one in built_in(llm, count or PROMPTS)]
        if llm.tokenizer is None:
            raise ConfigError(f"{llm.loaded.name} has no tokenizer for --prompts; leave it out for built-in token ids")
        made = [one.prepared(llm, chat=None, system=None) for one in wanted[:count]]
        ids = [llm.tokenizer(one).input_ids if isinstance(one, str) else one for one in made]
        for place, one in enumerate(ids, 1):
            if not one or len(one) > room:
                raise ConfigError(
                    f"prompt {place} has {len(one)} tokens, and 1 to {room} fit beside --max-tokens "
                    f"{self._check.max_tokens}; shorten it, or ask for less"
                )
        return ids

    def _tell(
        self,
        proof: Proof,
        target: Target,
        tokenizer: Any,
        recalls: list[Recall] | None = None,
        differences: list[str] | None = None,
    ) -> None:
        from outrider.cli.findings import as_json, closing, tables

        if self._check.as_json:
            typer.echo(json.dumps(as_json(proof, recalls, differences), ensure_ascii=False))
        else:
            tables(proof, tokenizer, recalls)
        for difference in differences or []:
            say(f"note: {difference}: rounding may differ")
        line = closing(proof, target, recalls)
        if not self._check.quiet:
            say(line)
        idle = [one for one in proof.cells if one.shows_nothing]
        if idle and not proof.defects:
            why = "nothing was guessed" if not idle[0].drafted else "no beginning is common enough to be tested"
            raise ConfigError(
                f"at {idle[0].setting} {why}, so nothing is shown: give longer texts, more samples, other prompts or "
                "another method"
            )
