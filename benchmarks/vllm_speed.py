"""Speed of vLLM on a checkpoint folder, plain or with a draft model: one process, one configuration.

    PYTHONPATH=SITE python benchmarks/vllm_speed.py TARGET --prompts FILE... --rows 1 4 16 --out FILE
        [--draft FOLDER --lookahead 5]

Run by gpu_rounds.py, which never has two engines on the card at once: memory is free again when this process ends. It
imports nothing of Outrider. Each prompts file is a list of lists of token ids; greedy, end-of-sequence ignored. The
first of the runs compiles and is marked as warm-up. Appends one JSON line a batch to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR"
)


def main() -> None:
    options = _options()
    began = options.began or time.time()
    from vllm import LLM, SamplingParams, __version__

    imported = time.time()
    batches = [json.loads(path.read_text(encoding="utf-8")) for path in options.prompts]
    longest = max(len(prompt) for prompts in batches for prompt in prompts) + options.tokens + 32
    length = max(2048, longest)
    extra: dict[str, Any] = {}
    if options.draft:
        extra["speculative_config"] = {
            "method": "draft_model",
            "model": str(options.draft),
            "num_speculative_tokens": options.lookahead,
            "max_model_len": length,
        }
    llm = LLM(
        str(options.target),
        skip_tokenizer_init=True,
        max_model_len=length,
        gpu_memory_utilization=0.85,
        dtype="bfloat16",
        enable_prefix_caching=False,
        **extra,
    )
    ready = time.time()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": batches[0][0]}], one, use_tqdm=False)
    start_up = {"imports": imported - began, "ready": ready - imported, "first_token": time.time() - ready}
    _append(options.out, {"start_up": start_up, "version": __version__})
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    for prompts in batches:
        for rows in options.rows:
            batch = [{"prompt_token_ids": prompts[place % len(prompts)]} for place in range(rows)]
            seconds, outputs = [], []
            for _ in range(options.repeats + 1):
                start = time.perf_counter()
                outputs = llm.generate(batch, params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            cell = {"rows": rows, "context": len(prompts[0]), "seconds": seconds, "token_ids": tokens}
            _append(options.out, {"cell": cell})


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path)
    add("--prompts", type=Path, nargs="+", required=True, help="JSON files, each a list of lists of token ids")
    add("--rows", type=int, nargs="+", default=[1, 4, 16])
    add("--draft", type=Path)
    add("--lookahead", type=int, default=5, help="num_speculative_tokens, with --draft")
    add("--tokens", type=int, default=256)
    add("--repeats", type=int, default=3)
    add("--out", type=Path, required=True, help="a file that JSON lines are appended to")
    add("--began", type=float, help="when this process was started, seconds since 1970")
    return parser.parse_args()


if __name__ == "__main__":
    main()
