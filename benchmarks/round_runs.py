"""One stage of gpu_rounds.py in a process of its own: the pair, Outrider, or transformers.

    python -m benchmarks.round_runs STAGE JOB.json

A stage reads its job (a JSON object), appends a JSON line to job["out"] for everything it has measured, and leaves: so
start-up can be timed from nothing, memory is free again, and what was measured before a crash or a timeout is kept.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["clocked", "facts_of", "ours", "prompts_of", "setup", "stock", "tell", "wait"]

COPY_BYTES = 2 << 30


def main() -> None:
    stages = {"setup": setup, "ours": ours, "transformers": stock}
    job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    stages[sys.argv[1]](job)


def tell(job: dict[str, Any], **line: Any) -> None:
    with Path(job["out"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# --- the pair, and how fast the card copies


def setup(job: dict[str, Any]) -> None:
    """Write the pair, one more draft for each other agreement, and the prompts; measure a copy within the card."""
    import torch

    from outrider.bench.pair import open_pair

    work, began = Path(job["work"]), time.perf_counter()
    drafts = {f"{agreement:g}": str(_draft(job, work, agreement)) for agreement in job["agreements"]}
    saying = open_pair(work / "target", next(iter(drafts.values()))).saying
    for context in job["contexts"]:
        prompts = saying.prompts(job["num_prompts"], context)
        (work / f"prompts-{context}.json").write_text(json.dumps(prompts) + "\n", encoding="utf-8")
    weights = {"target": _weight_bytes(work / "target"), "draft": _weight_bytes(next(iter(drafts.values())))}
    tell(job, pair_seconds=time.perf_counter() - began, drafts=drafts, weights=weights)
    on_card = torch.cuda.is_available() and not job["tiny"]
    card = torch.cuda.get_device_name(0) if on_card else "cpu"
    tell(job, card=card, copy=_copy(torch.device("cuda" if on_card else "cpu")))
    if on_card:
        torch.cuda.empty_cache()


def _draft(job: dict[str, Any], work: Path, agreement: float) -> Path:
    """Give the draft of an agreement, as an earlier run left it or newly written, and the target where it lacks."""
    from outrider.bench.pair import write_draft, write_pair
    from outrider.bench.shapes import parse_shape

    shape = parse_shape(job["target"])
    small = parse_shape(job["draft"], shape.vocab)
    target = facts_of(work / "target")
    if (target.get("shape"), target.get("seed")) != (shape, job["seed"]):
        write_pair(work, target=shape, draft=small, agreement=agreement, seed=job["seed"], num_prompts=2, force=True)
    folder = work / f"draft-{agreement:g}"
    for there in (work / "draft", folder):
        facts = facts_of(there)
        if [facts.get(name) for name in ("shape", "seed", "agreement")] == [small, job["seed"], agreement]:
            return there
    return write_draft(folder, target=work / "target", draft=small, agreement=agreement, force=True).draft


def facts_of(folder: Path) -> dict[str, Any]:
    """Give what a pair's folder was written with; nothing where there is none."""
    from outrider.bench.pair import read_facts
    from outrider.errors import ModelLoadError

    try:
        return read_facts(folder)
    except ModelLoadError:
        return {}


def _weight_bytes(folder: Path | str) -> dict[str, int]:
    """Bytes that one pass reads (all weights but the embedding), and bytes of keys and values a token."""
    import torch

    from outrider.bench.pair import read_facts
    from outrider.bench.shards import num_bytes

    facts = read_facts(folder)
    shape, dtype = facts["shape"], getattr(torch, facts["dtype"])
    tensors = {name: sizes for name, sizes in shape.tensors().items() if name != "model.embed_tokens.weight"}
    kept = {"keys and values": (2 * shape.layers, shape.kv_heads, shape.head_dim)}
    return {"read": num_bytes(tensors, dtype), "token": num_bytes(kept, dtype)}


def _copy(device: Any) -> dict[str, Any]:
    """Copy a large buffer within the device; bytes read and bytes written both count."""
    import torch

    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES >> 8
    one = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    other = torch.empty_like(one)
    seconds = []
    for _ in range(12):
        wait(device)
        began = time.perf_counter()
        for _ in range(10):
            other.copy_(one)
        wait(device)
        seconds.append((time.perf_counter() - began) / 10)
    rates = [2 * size / one / 1e9 for one in seconds[2:]]
    return {"gb_per_second": sorted(rates)[len(rates) // 2], "all": rates, "bytes": size}


def wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


# --- Outrider


def ours(job: dict[str, Any]) -> None:
    """Start an LLM, time that, then run the job's cells: [rows, guesses, context]."""
    import torch

    from outrider import LLM, SamplingParams
    from outrider.model.load import load_model

    assert LLM is not None  # imported by now, with all that it needs
    imported, work, cells = time.time(), Path(job["work"]), job["cells"]
    batches = {context: prompts_of(work, context) for context in {cell[2] for cell in cells}}
    with clocked([load_model]) as loading:
        llm = _llm(job, max(batches) + job["tokens"] + 32)
    made = time.time()
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(batches[cells[0][2]][0], first, progress=False)
    start_up = {
        "imports": imported - job["began"],
        "load": sum(loading),
        "ready": made - imported - sum(loading),
        "first_token": time.time() - made,
        "all": time.time() - job["began"],
    }
    tell(job, start_up=start_up)
    for cell in cells:
        if time.time() > job["deadline"]:
            tell(job, skipped=cell, reason="out of time")
            continue
        rows, lookahead, context = cell
        batch = [batches[context][place % len(batches[context])] for place in range(rows)]
        try:
            tell(job, cell=_cell(job, llm, batch, lookahead) | {"context": context})
        except Exception as error:  # noqa: BLE001 - on record; the other cells are measured all the same
            tell(job, skipped=cell, reason=f"{type(error).__name__}: {error}"[:300])
    if torch.cuda.is_available():
        tell(job, peak_bytes=torch.cuda.max_memory_reserved())
    llm.close()


def _llm(job: dict[str, Any], length: int) -> Any:
    from outrider import LLM

    extra: dict[str, Any] = {"device": "cpu"} if job["tiny"] else {}
    if job["draft_quantization"] is not None:  # not every version knows it
        extra["draft_quantization"] = job["draft_quantization"]
    if "enable_prefix_caching" in inspect.signature(LLM).parameters:  # the same; batches come again and are read again
        extra["enable_prefix_caching"] = False
    rows, most = (max(cell[place] for cell in job["cells"]) for place in (0, 1))
    target = str(Path(job["work"]) / "target")
    return LLM(target, job["draft_folder"], max(1, most), max_model_len=length, max_num_seqs=rows, **extra)


def _cell(job: dict[str, Any], llm: Any, batch: list[list[int]], lookahead: int) -> dict[str, Any]:
    """Generate once to warm up, then as often as asked: all seconds, the last texts, each run's rounds."""
    from outrider import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, speculation=lookahead or "off")
    seconds, outputs, rounds = [], [], []
    for _ in range(job["repeats"] + 1):
        began = time.perf_counter()
        outputs = llm.generate(batch, params, progress=False)
        seconds.append(time.perf_counter() - began)
        rounds.append(_rounds([output.stats for output in outputs]))
    cell = {"rows": len(batch), "lookahead": lookahead, "agreement": job["agreement"]}
    return cell | {"seconds": seconds, "rounds": rounds, "token_ids": [list(output.token_ids) for output in outputs]}


def _rounds(stats: list[Any]) -> dict[str, float]:
    """Work out tokens a round, the agreement seen, and milliseconds a round after each row's first tokens (median)."""
    each = sorted(1e3 * (one.seconds - one.first_token_seconds) / (one.rounds - 1) for one in stats if one.rounds > 1)
    reached = sum(sum(one.reached_per_position) for one in stats)
    return {
        "ms": each[len(each) // 2] if each else 0.0,
        "first_token_seconds": max(one.first_token_seconds for one in stats),
        "tokens": sum(one.tokens for one in stats) / max(1, sum(one.rounds for one in stats)),
        "agreement": sum(sum(one.accepted_per_position) for one in stats) / reached if reached else 0.0,
    }


@contextmanager
def clocked(functions: Iterable[Callable[..., Any]], holders: Iterable[Any] | None = None) -> Iterator[list[float]]:
    """Note how long each call of some functions takes, in whichever of our modules (or `holders`) they are called."""
    ours = [module for name, module in sys.modules.items() if name.startswith("outrider.")]
    seconds: list[float] = []
    replaced = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                seconds.append(time.perf_counter() - began)

        return call

    for function in functions:
        name, stand_in = function.__name__, timed(function)
        for holder in ours if holders is None else holders:
            if getattr(holder, name, None) is function:
                setattr(holder, name, stand_in)
                replaced.append((holder, name, function))
    try:
        yield seconds
    finally:
        for holder, name, function in replaced:
            setattr(holder, name, function)


def prompts_of(work: Path, context: int) -> list[list[int]]:
    found: list[list[int]] = json.loads((work / f"prompts-{context}.json").read_text(encoding="utf-8"))
    return found


# --- transformers


def stock(job: dict[str, Any]) -> None:
    """Run `model.generate`, one row, plain and with an assistant."""
    import torch
    import transformers

    imported = time.time()
    work, device = Path(job["work"]), "cpu" if job["tiny"] else "cuda"
    # Straight to the card where transformers can (with accelerate), else by way of the host.
    place = {"device_map": {"": device}} if find_spec("accelerate") else {}
    target, draft = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **place).to(device).eval()
        for folder in (work / "target", job["draft_folder"])
    )
    start_up = {"imports": imported - job["began"], "ready": time.time() - imported}
    tell(job, start_up=start_up, version=transformers.__version__)
    ids = torch.tensor([prompts_of(work, job["context"])[0]], device=device)
    fixed = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    for lookahead in job["lookaheads"]:
        extra: dict[str, Any] = {}
        if lookahead:
            draft.generation_config.num_assistant_tokens = lookahead
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            extra["assistant_model"] = draft
        seconds, tokens = [], []
        for _ in range(job["repeats"] + 1):
            wait(torch.device(device))
            began = time.perf_counter()
            with torch.inference_mode():
                output = target.generate(ids, max_new_tokens=job["tokens"], **fixed, **extra)
            tokens = output[0, ids.shape[1] :].tolist()
            seconds.append(time.perf_counter() - began)
        cell = {"rows": 1, "lookahead": lookahead, "context": job["context"], "agreement": job["agreement"]}
        tell(job, cell={**cell, "seconds": seconds, "token_ids": [tokens]})


if __name__ == "__main__":
    main()
