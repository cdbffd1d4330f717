"""`outrider generate`: text for one prompt as it comes, or for many together."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path  # Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from outrider import __version__
from outrider.cli.config_option import mention_config
from outrider.cli.console import FAILED, reported, say, working
from outrider.cli.grammar import GrammarOptions
from outrider.cli.options import STOPPING, ModelOptions, SamplingOptions
from outrider.cli.prompts import read_prompts
from outrider.cli.show import (
    Painter,
    comparison_table,
    completion_record,
    legend,
    summary,
    wants_colour,
)
from outrider.errors import InvalidRequestError
from outrider.prompts import Prompt

if TYPE_CHECKING:
    from outrider.cli.compare import Comparison, Run
    from outrider.llm import LLM
    from outrider.outputs import RequestOutput
    from outrider.sampling.params import SamplingParams

__all__ = ["OutputOptions", "PromptOptions", "generate"]

PROMPT, OUTPUT = "Prompt", "Output"


@dataclass(frozen=True)
class PromptOptions:
    """What to generate from."""

    prompt: Annotated[str | None, Argument(help="The prompt; - or nothing reads stdin.", show_default=False)] = None
    prompt_option: Annotated[
        str | None, Option("--prompt", "-p", metavar="TEXT", help="The same, as an option.", rich_help_panel=PROMPT)
    ] = None
    file: Annotated[
        Path | None,
        Option(
            "--file",
            "-f",
            help='One prompt; or, as .jsonl, an object with "prompt" or "messages" a line (other fields are ignored).',
            rich_help_panel=PROMPT,
        ),
    ] = None
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--raw",
            help="The prompt is a user's message, or a text to go on from.",
            show_default="--chat for models with a chat template",
            rich_help_panel=PROMPT,
        ),
    ] = None
    system: Annotated[
        str | None, Option(metavar="TEXT", help="A system prompt; also spelled -sys.", rich_help_panel=PROMPT)
    ] = None


@dataclass(frozen=True)
class OutputOptions:
    """How much to generate, and how to show it."""

    max_tokens: Annotated[
        int, Option("--max-tokens", "-n", help="Tokens at most, -1 to the context's end.", rich_help_panel=STOPPING)
    ] = 256
    num_samples: Annotated[int, Option(help="Texts a prompt, 1 to 1024.", rich_help_panel=OUTPUT)] = 1
    compare: Annotated[
        bool,
        Option("--compare", help="Also decode plainly; check that tokens are equal, and time.", rich_help_panel=OUTPUT),
    ] = False
    repeat: Annotated[int, Option(min=1, help="--compare: times, by turns; medians count.", rich_help_panel=OUTPUT)] = 1
    show_tokens: Annotated[
        bool,
        Option("--show-tokens", help="Colour tokens by how they came (marks without colours).", rich_help_panel=OUTPUT),
    ] = False
    as_json: Annotated[
        bool,
        Option("--json", help="One JSON object a text; with --compare one in all.", rich_help_panel=OUTPUT),
    ] = False
    logprobs: Annotated[
        int | None, Option(help="--json: with the N likeliest tokens at each place, 0 to 100.", rich_help_panel=OUTPUT)
    ] = None
    prompt_logprobs: Annotated[
        int | None, Option(help="--json: the same for the prompt's tokens.", rich_help_panel=OUTPUT)
    ] = None
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=OUTPUT)] = (
        False
    )
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.", rich_help_panel=OUTPUT)] = False


def generate(
    prompt: PromptOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    form: GrammarOptions,
    output: OutputOptions,
) -> None:
    """Check everything that needs no model, load, then stream, run a batch, or compare."""
    with reported(show_traceback=output.traceback):
        params = sampling.params(
            output.max_tokens,
            n=output.num_samples,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            grammar=form.grammar(),
        )
        if (output.logprobs, output.prompt_logprobs) != (None, None) and not output.as_json:
            raise InvalidRequestError("--logprobs and --prompt-logprobs are shown with --json only; add it")
        if output.repeat > 1 and not output.compare:
            raise InvalidRequestError(f"--repeat {output.repeat} is how often --compare runs; add that")
        prompts = read_prompts(prompt.prompt, prompt.prompt_option, prompt.file)
        if not output.quiet:
            mention_config(model.config)
        with working(f"loading {model.shown_model}", quiet=output.quiet):
            # Where two ways are timed, each reads the prompts.
            llm = model.load(enable_prefix_caching=False) if output.compare else model.load()
        with llm:
            job = _Job(llm, prompts, prompt, _seeded(params, len(prompts)), output)
            if output.compare:
                job.compare()
            elif len(prompts) > 1 or params.n > 1 or output.as_json:
                job.batch()
            else:
                job.stream()


def _seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Give each prompt its parameters; where text is sampled without a seed, draw one, so that it can be told."""
    if params.greedy or params.seed is not None:
        return [params] * count
    return [params.but(seed=random.SystemRandom().getrandbits(63)) for _ in range(count)]


class _Job:
    """One run of the command, with the model loaded."""

    def __init__(
        self,
        llm: LLM,
        prompts: list[Prompt],
        wish: PromptOptions,
        params: list[SamplingParams],
        output: OutputOptions,
    ) -> None:
        self.llm, self.prompts, self.params, self.output = llm, prompts, params, output
        self.prepared = [one.prepared(llm, chat=wish.chat, system=wish.system) for one in prompts]
        self.colour = wants_colour()

    def stream(self) -> None:
        """Write one text as it comes."""
        painter = self._painter(0)
        self._legend()
        end, text = None, ""
        for end in self.llm.stream(self.prepared[0], self.params[0]):
            text = end.text or text
            done = end.finish_reason is not None
            shown = painter.paint(end.text, end.token_ids, end.origins, final=done) if painter else end.text
            sys.stdout.write(shown)
            sys.stdout.flush()
        assert end is not None
        assert end.stats is not None
        if not text.endswith("\n"):
            typer.echo()
        self._close([end.stats], end.stats.seconds, [end.error])

    def batch(self) -> None:
        """Run all texts together, then write them in the prompts' order."""
        began = time.perf_counter()
        outputs = self.llm.generate(self.prepared, self.params, progress=False if self.output.quiet else None)
        seconds = time.perf_counter() - began
        if self.output.as_json:
            for place, output in enumerate(outputs):
                for record in self._records(place, output):
                    typer.echo(json.dumps(record | {"settings": self._settings(place)}, ensure_ascii=False))
        else:
            self._legend()
            self._write(outputs)
        texts = [one for output in outputs for one in output.outputs]
        self._close([one.stats for one in texts], seconds, [one.error for one in texts])

    def compare(self) -> None:
        """Run both ways, show the text once and the table, and say whether the tokens are equal."""
        from outrider.cli.compare import compare, require_guesses, verdict

        require_guesses(self.llm, self.params)
        with working("decoding plainly and speculatively", quiet=self.output.quiet):
            comparison = compare(self.llm, self.prepared, self.params, self.output.repeat)
        if self.output.as_json:
            typer.echo(json.dumps(self._comparison_record(comparison), ensure_ascii=False))
        else:
            from rich.console import Console

            self._legend()
            self._write(list(comparison.speculative.outputs))
            typer.echo()
            Console(file=sys.stdout, no_color=not self.colour, highlight=False).print(comparison_table(comparison))
            typer.echo(verdict(comparison, self.llm))
        if comparison.failed:
            raise typer.Exit(FAILED)

    def _painter(self, place: int) -> Painter | None:
        prompt, tokenizer = self.prepared[place], self.llm.tokenizer
        if not self.output.show_tokens or tokenizer is None:
            return None
        from outrider.engine.detokenizer import Detokenizer

        skip = self.params[0].skip_special_tokens
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        return Painter(Detokenizer(tokenizer, ids, skip_special_tokens=skip), self.colour)

    def _legend(self) -> None:
        if self.output.show_tokens and not self.output.as_json:
            typer.echo(legend(self.colour) + "\n", color=self.colour)

    def _write(self, outputs: list[RequestOutput]) -> None:
        several = len(outputs) > 1 or len(outputs[0].outputs) > 1
        for place, output in enumerate(outputs, 1):
            for one in output.outputs:
                if several:
                    typer.echo(f"==> {place}{f'.{one.index + 1}' if len(output.outputs) > 1 else ''} <==")
                painter = self._painter(place - 1)
                shown = painter.paint(one.text, one.token_ids, one.origins) if painter else one.text
                typer.echo(shown, nl=not one.text.endswith("\n"), color=self.colour)

    def _close(self, stats: list[Any], seconds: float, errors: list[str | None]) -> None:
        if not self.output.quiet:
            say(summary(stats, seconds))
        failures = [error for error in errors if error is not None]
        for error in failures:
            say(f"error: {error}")
        if failures:
            raise typer.Exit(FAILED)

    def _records(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        shown = self.prompts[place].shown
        return [completion_record(shown, one, output.prompt_logprobs) for one in output.outputs]

    def _settings(self, place: int) -> dict[str, Any]:
        """Give what it takes to run this again."""
        speculation, params = self.llm.engine.speculation, asdict(self.params[place].but(speculative_model=None))
        del params["speculative_model"]
        return {
            "outrider": __version__,
            "model": self.llm.loaded.name,
            "dtype": str(self.llm.loaded.dtype).removeprefix("torch."),
            "device": str(self.llm.loaded.device),
            "method": str(speculation.method),
            "speculative_model": None if speculation.model is None else str(speculation.model),
            "num_speculative_tokens": speculation.num_speculative_tokens,
            "verification": str(speculation.verification),
            "exact": self.llm.engine.config.exact,
            "max_model_len": self.llm.max_model_len,
            "chat_template": not isinstance(self.prepared[place], str),
            "sampling": params,
        }

    def _comparison_record(self, comparison: Comparison) -> dict[str, Any]:
        return {
            "equal": comparison.equal,
            "must_be_equal": comparison.guaranteed,
            "differences": [asdict(one) for one in comparison.differences],
            "speedup": round(comparison.speedup, 4),
            "plain": self._run_record(comparison.plain),
            "speculative": self._run_record(comparison.speculative),
            "settings": self._settings(0),
        }

    def _run_record(self, run: Run) -> dict[str, Any]:
        return {
            "tokens": run.tokens,
            "seconds": round(run.seconds, 6),
            "tokens_per_second": round(run.tokens_per_second, 3),
            "acceptance_rate": round(run.acceptance_rate, 4),
            "tokens_per_round": round(run.tokens_per_round, 4),
            "outputs": [one for place, output in enumerate(run.outputs) for one in self._records(place, output)],
        }
