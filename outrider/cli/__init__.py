"""The command line. Nothing here imports torch before there is work to do: `outrider --help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli import chat, generate
from outrider.cli.bench import BENCH_EXAMPLES, BENCH_HELP, BENCH_WITHOUT, bench
from outrider.cli.doctor import DOCTOR_EXAMPLES, DOCTOR_HELP, doctor
from outrider.cli.groups import from_groups
from outrider.cli.pair import PAIR_EXAMPLES, PAIR_HELP, pair
from outrider.cli.plan import PLAN_EXAMPLES, PLAN_HELP, plan
from outrider.cli.serve import SERVE_EXAMPLES, SERVE_HELP, serve
from outrider.cli.spellings import LlamaSpellings
from outrider.cli.tune import TUNE_EXAMPLES, TUNE_HELP, TUNE_WITHOUT, tune
from outrider.cli.verify import VERIFY_EXAMPLES, VERIFY_HELP, verify

__all__ = ["app", "main"]

ABOUT = """Generate text with a large language model, faster, without changing a single token.

A cheap drafter guesses the next tokens; the model checks all guesses in one pass and keeps those that it would have
written itself. The text is the model's own, for sampling too: with the same seed it is the same with and without
speculation, and `--compare` shows it.

**Try it** (without -m: a small instruct model, SmolLM2-135M)

    outrider generate "Write a haiku about the sea"

    outrider generate --compare "Repeat after me: one two three one two three"

    outrider generate -m target.gguf -md draft.gguf -p "Once upon a time" -n 256 --draft 5

    outrider chat

    outrider serve

    outrider verify   # is the text the same with guesses and without?

    outrider bench   # what do guesses gain here?

    outrider tune --dataset my_prompts.jsonl   # which setting is best for these?

**Where guesses come from:** without a draft, from text that repeats (method ngram; it rests by itself while that does
not pay); with -md, from a small model with the same vocabulary. `outrider COMMAND --help` tells more.
"""

GENERATE_HELP = """Generate text for a PROMPT, a file (-f) or what is piped in, and stream it to stdout.

For a model with a chat template the prompt is a user's message and the text its answer; `--raw` has the model go on
from the prompt as it stands, as it does for models without a template. Greedy unless you give `--temperature`.

Afterwards one line on stderr tells how it went; `--quiet` drops it. `--json` prints one object instead of the text.
Several prompts (a .jsonl file) run together, and their texts come in the file's order.
"""

GENERATE_EXAMPLES = """**Examples**

    outrider generate "Explain speculative decoding in one sentence"

    cat notes.txt | outrider generate --system "Summarise the user's text." --max-tokens 100

    outrider generate --raw "def quicksort(items):" --stop "def " --show-tokens

    outrider generate "Which colour has the sky?" --regex "(red|green|blue)"

    outrider generate -m Qwen/Qwen2.5-7B-Instruct -md Qwen/Qwen2.5-0.5B-Instruct --compare --repeat 3 "Hello"

llama.cpp's spellings work too: -md, --model-draft, --draft, --draft-max, -n, --predict, -c, --ctx-size, --temp, -s,
--repeat-penalty, -sys, -t.

**Exit codes:** 0 done, 1 the texts of --compare differ although they must not (or a text failed), 2 something you gave
was wrong, 130 interrupted.
"""

CHAT_HELP = """Talk with a model: a line is a message, the answer streams back.

/reset forgets the conversation, /system TEXT sets the system prompt, /stats tells how fast it was, /exit leaves (so
does Ctrl-D). Ctrl-C stops an answer, not the program. Works in a pipe: each line of stdin is a message.
"""

CHAT_EXAMPLES = """**Examples**

    outrider chat

    outrider chat -m Qwen/Qwen2.5-7B-Instruct -md Qwen/Qwen2.5-0.5B-Instruct --system "Answer in one sentence."

    printf 'Hello\\n/stats\\n' | outrider chat --temperature 0.7 --seed 1

**Exit codes:** 0 you left, 2 something you gave was wrong, 130 interrupted.
"""

app = typer.Typer(
    name="outrider",
    help=ABOUT,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("generate", cls=LlamaSpellings, help=GENERATE_HELP, epilog=GENERATE_EXAMPLES)(
    from_groups(generate.generate)
)
app.command("chat", cls=LlamaSpellings, help=CHAT_HELP, epilog=CHAT_EXAMPLES)(from_groups(chat.chat))
app.command("serve", cls=LlamaSpellings, help=SERVE_HELP, epilog=SERVE_EXAMPLES)(from_groups(serve))
app.command("verify", cls=LlamaSpellings, help=VERIFY_HELP, epilog=VERIFY_EXAMPLES)(from_groups(verify))
app.command("bench", cls=LlamaSpellings, help=BENCH_HELP, epilog=BENCH_EXAMPLES)(from_groups(bench, BENCH_WITHOUT))
app.command("tune", cls=LlamaSpellings, help=TUNE_HELP, epilog=TUNE_EXAMPLES)(from_groups(tune, TUNE_WITHOUT))
app.command("plan", cls=LlamaSpellings, help=PLAN_HELP, epilog=PLAN_EXAMPLES)(from_groups(plan))
app.command("doctor", cls=LlamaSpellings, help=DOCTOR_HELP, epilog=DOCTOR_EXAMPLES)(from_groups(doctor))
app.command("pair", help=PAIR_HELP, epilog=PAIR_EXAMPLES)(pair)


def main() -> None:
    """Run the command line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: what is said then is for nobody
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as we run
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model may say what the terminal cannot show
            stream.reconfigure(errors="replace")
    app(prog_name="outrider")
