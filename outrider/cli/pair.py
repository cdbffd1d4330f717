"""`outrider pair`: write a synthetic target and draft of real sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from outrider.bench.shapes import SHAPES
from outrider.cli.console import byte_bar, reported, say
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.pair import Pair

__all__ = ["PAIR_EXAMPLES", "PAIR_HELP", "pair"]

PAIR_HELP = f"""Write a synthetic target and draft: random checkpoints of real sizes whose text is known beforehand.

The target's greedy text is a random cycle through its vocabulary; its layers cost what real ones cost and add only
noise. The draft says the same after a chosen share of the tokens (`--agreement`). Both are ordinary safetensors
folders, OUT_DIR/target and OUT_DIR/draft, so that any engine can run them and be compared on equal terms, with nothing
to download. There is no tokenizer: prompts are token ids, ready in OUT_DIR/target/prompt_ids.json.

Shapes: {", ".join(SHAPES)}; or sizes: hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,intermediate=128,vocab=512
[,type=llama or qwen3][,positions=16384]. The draft takes the target's vocabulary.
"""

PAIR_EXAMPLES = """**Examples**

    outrider pair /tmp/pair   # 8B and 1B, 19 GB; seconds on a GPU

    outrider pair /tmp/pair --only draft --agreement 0.6 --force   # another draft for the same target

    outrider pair /tmp/small --target tiny --draft tiny --prompt-length 50

    outrider plan /tmp/small/target -md /tmp/small/draft   # what next: plan and verify need no tokenizer

**Exit codes:** 0 done, 1 the disk refused it, 2 something you gave was wrong, 130 interrupted.
"""


def pair(
    out_dir: Annotated[Path, Argument(help="Where to; target and draft become folders in it.", show_default=False)],
    target: Annotated[
        str | None, Option(metavar="SHAPE", help="The target's shape.", show_default="llama-3.1-8b")
    ] = None,
    draft: Annotated[
        str | None, Option(metavar="SHAPE", help="The draft's shape.", show_default="llama-3.2-1b")
    ] = None,
    agreement: Annotated[float, Option(help="Share of tokens on which the draft agrees, 0 to 1.")] = 0.8,
    seed: Annotated[int | None, Option(help="Of the text and the weights.", show_default="0")] = None,
    dtype: Annotated[str | None, Option(help="bfloat16, float16 or float32.", show_default="bfloat16")] = None,
    num_prompts: Annotated[int, Option(help="Prompts in prompt_ids.json, 1 or more.")] = 16,
    prompt_length: Annotated[int, Option(help="Tokens of each prompt, 1 or more.")] = 200,
    device: Annotated[
        str | None, Option(help="Draw the weights on cuda or cpu.", show_default="cuda where there is a card")
    ] = None,
    only: Annotated[
        str | None, Option(metavar="draft", help="Leave the target as it is; write a draft for it.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace a pair that is there (other files stay).")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.")] = False,
) -> None:
    """Write the pair, or only its draft, and say what was written."""
    with reported(show_traceback=traceback):
        if only not in (None, "draft"):
            raise ConfigError(f"--only must be draft, got {only!r}")
        from outrider.bench.pair import write_draft, write_pair

        common: dict[str, Any] = {"agreement": agreement, "device": device, "force": force}
        with byte_bar("writing", quiet=quiet) as advance:
            if only == "draft":
                there = _same_target(out_dir, target=target, seed=seed, dtype=dtype)
                made = write_draft(
                    out_dir / "draft", target=there, draft=draft or _draft_of(out_dir), advance=advance, **common
                )
            else:
                made = write_pair(
                    out_dir,
                    target=target or "llama-3.1-8b",
                    draft=draft or "llama-3.2-1b",
                    seed=seed or 0,
                    dtype=dtype or "bfloat16",
                    num_prompts=num_prompts,
                    prompt_length=prompt_length,
                    advance=advance,
                    **common,
                )
        if not quiet:
            _close(made)


def _same_target(out_dir: Path, **asked: Any) -> Path:
    """Give the target's folder, unless what is asked of it is not what it is."""
    from outrider.bench.pair import read_facts
    from outrider.bench.shapes import parse_shape

    facts = read_facts(out_dir / "target")
    for name, value in asked.items():
        there = facts["shape" if name == "target" else name]
        if value is not None and (parse_shape(value) if name == "target" else value) != there:
            raise ConfigError(
                f"--only draft keeps the target, whose {name} is not {value!r}; leave out --{name} or --only"
            )
    return out_dir / "target"


def _draft_of(out_dir: Path) -> Any:
    """Give the shape of the draft that is there; Llama 3.2's 1B where there is none."""
    from outrider.bench.pair import read_facts
    from outrider.errors import ModelLoadError

    try:
        return read_facts(out_dir / "draft")["shape"]
    except ModelLoadError:
        return "llama-3.2-1b"


def _close(made: Pair) -> None:
    prompts = f"{len(made.prompts)} of {len(made.prompts[0])} tokens, in {made.target / 'prompt_ids.json'}"
    say(f"target:  {made.target}\ndraft:   {made.draft} (agreement {made.agreement:g})\nprompts: {prompts}")
