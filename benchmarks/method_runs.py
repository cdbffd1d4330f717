"""One stage of gpu_methods.py in a process of its own: the weights, or one way to draft.

python -m benchmarks.method_runs STAGE JOB.json
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import round_runs
from benchmarks.round_runs import clocked, prompts_of, tell, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider import LLM, SamplingParams
    from outrider.bench.shapes import Shape

__all__ = ["setup", "way"]

SETTLING = 4  # rounds after everybody's first token that are not looked at
MOST_LINES = 20  # of warnings, and of notes


def main() -> None:
    stages = {"setup": setup, "way": way}
    job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    stages[sys.argv[1]](job)


# --- the weights


def setup(job: dict[str, Any]) -> None:
    """Write the pair and prompts, measure a copy, and write the heads that the job names."""
    import torch

    from outrider.bench.heads import write_eagle3, write_medusa
    from outrider.bench.shapes import parse_shape

    round_runs.setup(job)
    shape, work = parse_shape(job["target"]), Path(job["work"])
    device = "cuda" if torch.cuda.is_available() and not job["tiny"] else "cpu"
    writers: dict[str, Callable[[Path, Shape], Path]] = {
        "eagle3": lambda path, target: write_eagle3(
            path, target, draft_vocab=job["draft_vocab"], seed=job["seed"], device=device
        ),
        "medusa": lambda path, target: write_medusa(path, target, seed=job["seed"], device=device),
    }
    for name in job["heads"]:
        began = time.perf_counter()
        writers[name](work / name, shape)
        tell(job, head=name, head_seconds=time.perf_counter() - began)


# --- a way


def way(job: dict[str, Any]) -> None:
    """Start an LLM, generate a text, then measure rounds of each number of rows."""
    import torch

    with _hearing() as heard, _started(job, heard) as llm:
        if job["guesses"] and llm.engine.drafter is None:
            raise RuntimeError(f"nothing drafts: {'; '.join(heard.warnings)}")
        tell(job, texts=_texts(job, llm))
        for rows in job["rows"]:
            try:
                tell(job, cell=_cell(job, llm, _prompts(job)[:rows]))
            except Exception as error:  # noqa: BLE001 - on record; the other cells are measured all the same
                tell(job, skipped=rows, reason=f"{type(error).__name__}: {error}"[:300])
        tell(job, warnings=heard.warnings, drafter_failures=llm.engine.speculator.num_failures)
        if torch.cuda.is_available():
            tell(job, peak_bytes=torch.cuda.max_memory_reserved())


def _started(job: dict[str, Any], heard: _Heard) -> LLM:
    """Make the LLM, and tell where its start's seconds went."""
    from outrider import LLM
    from outrider.engine.engine import Engine
    from outrider.model.eagle_files import load_eagle
    from outrider.model.load import load_model
    from outrider.model.medusa_heads import load_medusa

    imported = time.time()
    with clocked([load_model, load_eagle, load_medusa]) as loading, clocked([Engine.prepare], [Engine]) as preparing:
        llm = LLM(
            str(Path(job["work"]) / "target"),
            job["model"],
            max_model_len=job["context"] + max(_room(job), job["tokens"]),
            max_num_seqs=max(job["rows"]),
            enable_prefix_caching=False,  # beginnings come again and are read again
            **job["options"],
            **({"device": "cpu"} if job["tiny"] else {}),
        )
    start_up = {"imports": imported - job["began"], "load": sum(loading), "capture": sum(preparing)}
    start_up |= {"all": time.time() - job["began"]}
    graphs = llm.engine.graphs
    captured = 0 if graphs is None else graphs.num_captured
    tell(job, start_up=start_up, num_captured=captured, notes=heard.notes, warnings=heard.warnings)
    return llm


def _texts(job: dict[str, Any], llm: LLM) -> list[list[int]]:
    """The beginnings of as many texts as there are rows, with guesses in every round."""
    from outrider import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, speculation=job["guesses"])
    outputs = llm.generate(_prompts(job)[: max(job["rows"])], params, progress=False)
    return [list(output.token_ids) for output in outputs]


def _prompts(job: dict[str, Any]) -> list[list[int]]:
    return prompts_of(Path(job["work"]), job["context"])


def _cell(job: dict[str, Any], llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Time as many stretches as asked, after one that warms up; fewer where time runs out."""
    from outrider import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=_room(job), ignore_eos=True, speculation=job["guesses"])
    stretches: list[dict[str, Any]] = []
    while len(stretches) <= job["repeats"] and (time.time() < job["deadline"] or len(stretches) == 1):
        stretches.append(_stretch(llm, prompts, params, job["rounds"]))
    if len(stretches) < 2:
        raise TimeoutError("out of time")
    if job["guesses"] and not any(one["drafted"] for one in stretches):
        raise RuntimeError("no guess was made: see the warnings")
    return {"rows": len(prompts), "context": job["context"], "stretches": stretches}


def _stretch(llm: LLM, prompts: list[list[int]], params: SamplingParams, rounds: int) -> dict[str, Any]:
    """Start all prompts, let them settle, time `rounds` rounds in which no text ends, and let go of them."""
    engine = llm.engine
    sequences = [one for prompt in prompts for one in llm.intake.sequences(llm.intake.request(prompt, params))]
    try:
        for one in sequences:
            engine.add(one)
        while not all(one.output or one.finished for one in sequences):
            engine.step()
        for _ in range(SETTLING):
            engine.step()
        before, began = _counts(llm), time.perf_counter()
        for _ in range(rounds):
            engine.step()
        after, seconds = _counts(llm), time.perf_counter() - began
        ended = next((one for one in sequences if one.finished), None)
        if ended is not None:
            raise RuntimeError(f"a text ended within the stretch ({ended.error or ended.finish_reason})")
    finally:
        for one in sequences:
            engine.abort(one)
        engine.step()  # reads the round that is under way still
    return {name: after[name] - before[name] for name in before} | {"seconds": seconds}


def _counts(llm: LLM) -> dict[str, Any]:
    """What the engine has counted so far, once the device has done all that was asked of it."""
    engine = llm.engine
    wait(engine.runner.device)
    figures = engine.figures
    return {
        "rounds": figures.rounds,
        "tokens": figures.tokens,
        "drafted": figures.drafted,
        "accepted": figures.accepted,
        "replays": 0 if engine.graphs is None else engine.graphs.num_replays,
        "host_seconds": figures.propose_seconds,  # of guesses that were not part of a captured round
    }


def _room(job: dict[str, Any]) -> int:
    """New tokens after which no text ends in a stretch, nor is a round's draft cut short, if all guesses agree."""
    steps = SETTLING + job["rounds"] + 4 + max(job["rows"]) * (1 + job["context"] // 512)  # prompts come one by one
    return int(steps * (job["deepest"] + 1) + 2 * job["guesses"])  # what is under way, and what comes next


class _Heard(logging.Handler):
    """Keeps what our package said, each line once: warnings, and notes such as how long tuning and capture took."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()[:500]
        lines = self.warnings if record.levelno >= logging.WARNING else self.notes
        expected = "has no tokenizer" in line  # synthetic models have none
        if not expected and line not in lines and len(lines) < MOST_LINES:
            lines.append(line)


@contextmanager
def _hearing() -> Iterator[_Heard]:
    heard, ours = _Heard(), logging.getLogger("outrider")
    loggers, level = (ours, logging.getLogger("py.warnings")), ours.level
    logging.captureWarnings(True)
    ours.setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(heard)
    try:
        yield heard
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
        ours.setLevel(level)
        logging.captureWarnings(False)


if __name__ == "__main__":
    main()
