"""`outrider bench --url`: a server instead of an engine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from outrider.cli.bench_run import measured
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.bench.questions import Question
    from outrider.cli.bench import BenchOptions
    from outrider.cli.options import ModelOptions

__all__ = ["measure_url"]

KEY_VARIABLE = "OPENAI_API_KEY"


def measure_url(options: BenchOptions, model: ModelOptions, questions: list[Question]) -> tuple[dict[str, Any], bool]:
    """Measure the server at `options.url`; Ctrl-C keeps what was measured.

    Raises:
        ConfigError: An option makes no sense with a server, or there is none.
    """
    if options.methods is not None or options.peer or model.speculative_model is not None:
        raise ConfigError("--url measures a server as it is: leave out --methods, --speculative-model and --peer")
    if find_spec("httpx") is None:
        raise ConfigError("--url needs httpx, which is not installed: pip install 'outrider[bench]'")
    plan = options.plan(("none",))
    assert options.url is not None
    from outrider.bench.remote import RemoteBench, connect

    count = None if model.model is None else _counter(model.model)
    server = connect(options.url, os.environ.get(KEY_VARIABLE), options.served_model, count)
    from outrider.bench.report import prompt_facts, report_of

    run = RemoteBench(server, questions, plan)
    interrupted = measured(run, plan.repeats, quiet=options.quiet)
    if not server.ours:
        run.outcome.notes.append(
            "whether this server speculates is not to be seen from here: measure it a second time with its speculation "
            "off to learn what that gains"
        )
    told = prompt_facts(options.dataset, run.prompts)
    return report_of(run.outcome, run.settings, plan, run.facts, told), interrupted


def _counter(model: str) -> Callable[[str], int]:
    """Give what counts a text's tokens.

    Raises:
        ConfigError: The model has no tokenizer that can be read.
    """
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained  # untyped
    try:
        tokenizer = load(model)
    except Exception as error:
        raise ConfigError(f"the tokenizer of {model!r} cannot be read ({type(error).__name__}: {error})") from error
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
