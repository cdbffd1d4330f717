"""The engine without a server, for serve_load.py: a process that generates what it is told on its standard input.

    python -m benchmarks.load_offline JOB.json

The job holds the arguments of `LLM` and the number of threads. Each line of input is a request, a JSON object with
prompts (lists of token ids), tokens, speculation and together (all at once, or one after another); each is answered
with one line: the seconds it took, and the tokens. An empty object ends the process. Anything else that is printed goes
to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch

    from outrider import LLM

    if job["threads"]:
        torch.set_num_threads(job["threads"])

    def tell(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    with LLM(**job["llm"]) as llm:
        tell(ready=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if not asked:
                break
            tell(**_generated(llm, asked))


def _generated(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from outrider import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=asked["tokens"], ignore_eos=True, speculation=asked["speculation"]
    )
    prompts = asked["prompts"]
    groups = [prompts] if asked["together"] else [[prompt] for prompt in prompts]
    outputs, began = [], time.perf_counter()
    for group in groups:
        outputs += llm.generate(prompt_token_ids=group, sampling_params=params, progress=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(len(one.outputs[0].token_ids) for one in outputs)}


if __name__ == "__main__":
    main()
