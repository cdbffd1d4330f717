"""The options that commands share, in groups; each group knows how to become what the library takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path  # Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from outrider.cli.config_option import file_settings, given_options
from outrider.cli.values import byte_count, checked_method, token_biases
from outrider.config import SpeculationConfig
from outrider.config_file import merged
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM

__all__ = ["ModelOptions", "SamplingOptions"]

MODEL, DRAFTING, SAMPLING, STOPPING = "Model", "Drafting", "Sampling", "Stopping"
LOOKUP_METHODS = ("ngram", "suffix")
LOOKUP_TOKENS = 10  # guesses by lookup cost next to nothing to make, and a copied passage is often long


@dataclass(frozen=True)
class ModelOptions:
    """The target, its draft, and what they may use."""

    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            help="Hub id, folder or GGUF file.",
            show_default="SmolLM2-135M-Instruct",
            rich_help_panel=MODEL,
        ),
    ] = None
    speculative_model: Annotated[
        str | None,
        Option(
            help="The draft, given in the same ways, or a head's folder or Hub id; also spelled -md.",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            help="Where guesses come from: ngram or suffix (text that repeats), draft_model, early_exit (the target's "
            "own first layers), medusa, eagle, mtp or dflash heads, none; or several, the cheapest first: "
            "ngram+draft_model.",
            show_default="by the draft's config, else ngram",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            help="Guesses a round at most, 0 to 64; also spelled --draft.",
            show_default=f"{SpeculationConfig.num_speculative_tokens}, {LOOKUP_TOKENS} for lookup",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    tree: Annotated[
        str | None,
        Option(
            metavar="auto|4x2x1",
            help="Guess trees instead of chains: as the method likes, or so many guesses after each, level by level. "
            "A mixture verifies its parts' guesses together.",
            show_default="chains",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    cross_vocabulary: Annotated[
        str,
        Option(
            metavar="off|auto|tokens|text",
            help="Let a draft with another tokenizer guess, by tokens that both know, by text, or whichever suits.",
            rich_help_panel=DRAFTING,
        ),
    ] = SpeculationConfig.cross_vocabulary
    exit_layer: Annotated[
        int | None,
        Option(
            help="early_exit: draft with so many first layers.",
            show_default="found on sample texts",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    skip_layers: Annotated[
        str | None,
        Option(
            metavar="auto|3,5",
            help="early_exit: draft with all layers but these instead; auto finds them on sample texts.",
            show_default="none",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    suffix_corpus: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="suffix: text or .jsonl to find guesses in, besides each request's own text.",
            show_default="none",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    prompt_lookup_max: Annotated[
        int, Option(help="ngram: longest run of tokens to match, 1 to 64.", rich_help_panel=DRAFTING)
    ] = SpeculationConfig.prompt_lookup_max
    prompt_lookup_min: Annotated[
        int, Option(help="ngram: shortest run of tokens to match, 1 to 64.", rich_help_panel=DRAFTING)
    ] = SpeculationConfig.prompt_lookup_min
    verification: Annotated[
        str,
        Option(
            help="How guesses are judged: coupled (the same text as without), rejection or block (the same "
            "distribution), typical (lossy).",
            rich_help_panel=DRAFTING,
        ),
    ] = "coupled"
    exact: Annotated[
        bool,
        Option("--exact", help="Rounds of one fixed shape: not even a near-tie can differ.", rich_help_panel=DRAFTING),
    ] = False
    speculative_config: Annotated[
        str | None,
        Option(metavar="JSON", help="The same settings as one object, as vLLM spells them.", rich_help_panel=DRAFTING),
    ] = None
    dtype: Annotated[str, Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL)] = "auto"
    device: Annotated[
        str | None, Option(help="cpu, cuda, cuda:1.", show_default="cuda where there is a card", rich_help_panel=MODEL)
    ] = None
    draft_dtype: Annotated[
        str | None, Option(help="The draft's.", show_default="as the target's", rich_help_panel=DRAFTING)
    ] = None
    draft_device: Annotated[
        str | None, Option(help="The draft's.", show_default="as the target's", rich_help_panel=DRAFTING)
    ] = None
    draft_quantization: Annotated[
        str | None,
        Option(
            help="The draft's weights: fp8 (GPU), int8 or int4. Changes only speed, never the text.",
            show_default="none",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        Option(
            help="Let the draft guess only this many most frequent tokens, such as 16000: faster guesses, a few more "
            "misses. Changes only speed, never the text.",
            show_default="all",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    draft_vocab_corpus: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Text or .jsonl that shows which tokens are frequent; best is text like what you will generate.",
            show_default="the tokenizer's own order",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    quantization: Annotated[
        str | None, Option(help="int8 or int4 weights, on a CPU.", show_default="none", rich_help_panel=MODEL)
    ] = None
    revision: Annotated[str | None, Option(help="Of the Hub repository.", rich_help_panel=MODEL)] = None
    max_model_len: Annotated[
        int | None,
        Option(help="Longest prompt and text together; also -c.", show_default="the model's", rich_help_panel=MODEL),
    ] = None
    max_num_seqs: Annotated[int, Option(help="Texts generated together at most.", rich_help_panel=MODEL)] = 16
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Compute once what prompts have in common at their beginning.",
            rich_help_panel=MODEL,
        ),
    ] = True
    kv_cache_bytes: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory for keys and values, such as 512MiB.",
            show_default="what the model can use, a quarter of the free memory at most",
            rich_help_panel=MODEL,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Option(help="Share of the card's memory to use in all, above 0 to 1.", rich_help_panel=MODEL)
    ] = 0.9
    config: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Settings in a file, as `outrider tune` writes; options given here win over it.",
            show_default="none",
            rich_help_panel=MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None,
        Option("--threads", min=1, max=1024, help="CPU threads.", show_default="torch's", rich_help_panel=MODEL),
    ] = None

    @property
    def shown_model(self) -> str:
        """The target's name, for people."""
        return self.model or file_settings(self.config).get("model") or "the default model"

    def arguments(self) -> dict[str, Any]:
        """Give the arguments for `LLM`. With no draft, method or config, lookup drafts: it rests where it fails."""
        arguments = {name: value for name, value in vars(self).items() if name not in ("threads", "config")}
        if self.config is not None:
            given = given_options(self)
            arguments |= merged(
                file_settings(self.config), {name: arguments[name] for name in arguments if name in given}
            )
        arguments["speculative_config"] = config = self._config()
        if isinstance(arguments["kv_cache_bytes"], str):
            arguments["kv_cache_bytes"] = byte_count(arguments["kv_cache_bytes"])
        named = arguments["method"] is not None or arguments["speculative_model"] is not None
        if not named and not {"method", "model"} & set(config or ()):
            arguments["method"] = "ngram"
        lookup = checked_method(arguments, config or {}) in LOOKUP_METHODS
        if arguments["num_speculative_tokens"] is None:
            arguments["num_speculative_tokens"] = LOOKUP_TOKENS if lookup else SpeculationConfig.num_speculative_tokens
        return arguments

    def load(self, **settings: Any) -> LLM:
        """Load target and draft; `settings` are what no option says."""
        arguments = self.arguments() | settings
        from outrider.llm import LLM

        self.use_threads()
        return LLM(**arguments)

    def use_threads(self) -> None:
        """Let torch use as many threads as were asked for."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def _config(self) -> dict[str, Any] | None:
        if self.speculative_config is None:
            return None
        try:
            config = json.loads(self.speculative_config)
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON ({error}): {self.speculative_config!r}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"--speculative-config must be a JSON object, got {self.speculative_config!r}")
        return config


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose and when to stop; ranges are checked by `SamplingParams`."""

    temperature: Annotated[
        float, Option(help="0 to 100; 0 is greedy: always the likeliest token.", rich_help_panel=SAMPLING)
    ] = 0.0
    top_k: Annotated[int, Option(help="Keep this many likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)] = 0
    top_p: Annotated[
        float,
        Option(help="Keep the likeliest tokens up to this probability, above 0 to 1.", rich_help_panel=SAMPLING),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(help="Keep tokens at least this fraction as likely as the likeliest, 0 to 1.", rich_help_panel=SAMPLING),
    ] = 0.0
    seed: Annotated[
        int | None,
        Option(help="Fixes the sampled text.", show_default="a new one each time", rich_help_panel=SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float, Option(help="Off the logits of generated tokens, -2 to 2.", rich_help_panel=SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="The same, for each time they came, -2 to 2.", rich_help_panel=SAMPLING)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(help="Of tokens in prompt and text, above 0 to 10; above 1 discourages.", rich_help_panel=SAMPLING),
    ] = 1.0
    logit_bias: Annotated[
        list[str],
        Option(metavar="ID=VALUE", help="Added to a token's logit, -100 to 100; repeatable.", rich_help_panel=SAMPLING),
    ] = field(default_factory=list)
    bad_word: Annotated[
        list[str], Option(metavar="TEXT", help="Must not be generated; repeatable.", rich_help_panel=SAMPLING)
    ] = field(default_factory=list)
    stop: Annotated[
        list[str],
        Option(metavar="TEXT", help="Ends the text, and is cut off; repeatable.", rich_help_panel=STOPPING),
    ] = field(default_factory=list)
    stop_token_id: Annotated[
        list[int], Option(metavar="ID", help="Ends the text; repeatable.", rich_help_panel=STOPPING)
    ] = field(default_factory=list)
    include_stop: Annotated[bool, Option("--include-stop", help="Keep the stop text.", rich_help_panel=STOPPING)] = (
        False
    )
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on after the model's end-of-text.", rich_help_panel=STOPPING)
    ] = False
    min_tokens: Annotated[int, Option(help="No end before this many tokens, 0 or more.", rich_help_panel=STOPPING)] = 0
    special_tokens: Annotated[
        bool, Option("--special-tokens", help="Show special tokens in the text.", rich_help_panel=SAMPLING)
    ] = False
    speculation: Annotated[
        str,
        Option(metavar="auto|off|N", help="Guess while it pays, never, or always up to N.", rich_help_panel=DRAFTING),
    ] = "auto"

    def params(self, max_tokens: int, **more: Any) -> SamplingParams:
        """Give the sampling parameters; `max_tokens` -1 goes to the context's end.

        Raises:
            InvalidRequestError: A value is out of range.
        """
        wanted = self.speculation
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=token_biases(self.logit_bias),
            bad_words=self.bad_word,
            stop=self.stop,
            stop_token_ids=self.stop_token_id,
            include_stop_str_in_output=self.include_stop,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            skip_special_tokens=not self.special_tokens,
            speculation=int(wanted) if wanted.isdecimal() else wanted,  # type: ignore[arg-type]  # checked there
            max_tokens=None if max_tokens == -1 else max_tokens,
            **more,
        )
