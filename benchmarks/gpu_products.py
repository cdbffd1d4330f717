"""Products of few rows on a card: right or wrong, and how fast, beside the library's.

    python benchmarks/gpu_products.py [--quick] [--shapes qkv,o] [--out FILE.json]

Each timing is one CUDA graph of chained calls that rotate over enough copies of the weights to fill L2 twice, as the
layers of a model do. GB/s counts the weights alone, once a call. `tune` marks what Product.tune would choose from.
To try other tilings, add them to `EXTRA`: (block_n, block_k, split_k or 0 for automatic, warps, stages, prefetch).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.kernels.products import Product, product_reference
from outrider.kernels.tiles import Tiles, bucket_of, candidates, split_evenly

BF16 = torch.bfloat16
Run = Callable[[Product], Tensor]
Job = tuple[Product, Tensor, "Tensor | None", Tiles]


@dataclass(frozen=True)
class Shape:
    """One product of a model: its weight and what is fused in."""

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    wide: bool = False


SHAPES = [
    Shape("8b.qkv", 6144, 4096, norm=True),
    Shape("8b.o", 4096, 4096, residual=True),
    Shape("8b.gate_up", 28672, 4096, norm=True, gated=True),
    Shape("8b.down", 4096, 14336, residual=True),
    Shape("8b.head", 128256, 4096, norm=True, wide=True),
    Shape("1b.qkv", 3072, 2048, norm=True),
    Shape("1b.o", 2048, 2048, residual=True),
    Shape("1b.gate_up", 16384, 2048, norm=True, gated=True),
    Shape("1b.down", 2048, 8192, residual=True),
    Shape("1b.head", 128256, 2048, norm=True, wide=True),
]
ODD = [Shape("odd.576", 1536, 576, norm=True), Shape("odd.1536", 576, 1536, residual=True), Shape("odd.896", 1000, 896)]
ROWS = [1, 6, 16, 24, 32, 64, 96, 128]

EXTRA = {  # bucket -> tilings beside `candidates`; split_k 0: as many as give about two programs a processor
    16: [(64, 128, 0, 4, 3, 0), (64, 128, 1, 4, 4, 4), (64, 256, 0, 4, 3, 2), (64, 64, 0, 4, 6, 4),
         (128, 64, 0, 4, 5, 4), (128, 128, 0, 4, 3, 2), (128, 128, 0, 8, 4, 2), (32, 256, 0, 4, 3, 2),
         (16, 256, 0, 2, 4, 2)],
    32: [(64, 64, 0, 4, 5, 4), (128, 128, 0, 8, 3, 2)],
    64: [(64, 128, 0, 4, 3, 2), (128, 64, 0, 4, 4, 2), (128, 64, 0, 8, 4, 2)],
    128: [(128, 64, 0, 4, 3, 2), (64, 128, 0, 4, 3, 2), (128, 64, 0, 8, 4, 2)],
}  # fmt: skip
QUANTISED_EXTRA = [(32, 128, 0, 4, 4, 4), (64, 128, 0, 4, 6, 4), (128, 128, 0, 4, 4, 2), (16, 256, 0, 2, 4, 2)]


def tilings(shape: Shape, rows: int, quantization: str | None, quick: bool) -> list[Tiles]:
    bucket = bucket_of(rows)
    found = candidates(shape.outputs, shape.inputs, bucket, quantization)
    if not quick:
        for block_n, block_k, split_k, warps, stages, prefetch in (
            EXTRA[bucket] if not quantization else QUANTISED_EXTRA
        ):
            if quantization == "int4" and block_k != 128:
                continue
            tiles = Tiles(block_n, block_k, split_k or 1, warps, stages, prefetch)
            found.append(tiles if split_k else split_evenly(tiles, shape.outputs, shape.inputs, 2 * 132))
        if not quantization and bucket == 16:
            best = found[0]
            found += [replace(best, prefetch=number) for number in (0, 2, 8)]
            found += [replace(best, line=size) for size in (0, 32, 128)]
            found += [replace(best, release=steps) for steps in (1, 999)]
    return list(dict.fromkeys(found))


def products(shape: Shape, quantization: str | None = None) -> list[Product]:
    """Copies that together fill L2 (50 MB) twice. One random block repeats: filling 1 GB takes longer than timing."""
    size = shape.outputs * shape.inputs * 2 // {None: 1, "fp8": 2, "int8": 2, "int4": 4}[quantization]
    norm = torch.rand(shape.inputs, device="cuda").add(0.5).to(BF16)
    made = []
    for _ in range(max(1, -(-(110 << 20) // size))):
        weight = (torch.randn(shape.outputs, shape.inputs, device="cuda", dtype=BF16) * shape.inputs**-0.5).contiguous()
        made.append(
            Product(
                weight,
                norm=(norm, 1e-5) if shape.norm else None,
                gated=shape.gated,
                out_dtype=torch.float32 if shape.wide else None,
                quantization=quantization,
            )
        )
    return made


def inputs_of(shape: Shape, product: Product, rows: int) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(rows, shape.inputs, device="cuda").to(BF16)
    residual = torch.randn(rows, product.out_features, device="cuda").to(BF16) if shape.residual else None
    return x, residual


def microseconds(run: Run, copies: list[Product], size: int) -> float:
    """Of one call, inside a graph of enough calls for about 1 ms."""
    calls = -(-max(len(copies), min(128, int(1.5e9 / size))) // len(copies)) * len(copies)
    run(copies[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(copies[index % len(copies)])
    best = float("inf")
    for attempt in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if attempt:
            best = min(best, start.elapsed_time(end))
    return best * 1e3 / calls


def error_of(shape: Shape, product: Product, got: Tensor, x: Tensor, residual: Tensor | None) -> float:
    """Largest difference to the reference, in bf16 roundings of the largest element. The first weight rows suffice."""
    keep = min(512, product.out_features)
    chunks = [chunk for _, chunk in product.weight.chunks()]
    weights = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    kept = weights[:keep]
    if shape.gated:
        kept = torch.cat([kept, weights[product.out_features : product.out_features + keep]])
    expected = product_reference(
        x,
        kept,
        None,
        None if residual is None else residual[:, :keep],
        norm=product.norm,
        activation="silu" if shape.gated else None,
        out_dtype=torch.float32,
    )
    return float((got[:, :keep].float() - expected).abs().max() / expected.abs().max() / 2**-8)


def compile_all(jobs: list[Job]) -> None:
    """Compile every (product, x, residual, tiles) once, in threads; name those that do not compile."""
    from outrider.kernels.jit.launch_products import compile_product

    def work(job: Job) -> None:
        product, x, residual, tiles = job
        try:
            out = x.new_empty(x.shape[0], product.out_features, dtype=product.out_dtype)
            compile_product(product, x, out, residual, tiles)
        except Exception as error:  # noqa: BLE001 - reported
            print(f"  does not compile: {tiles}: {type(error).__name__} {str(error)[:200]}")

    with ThreadPoolExecutor(min(16, os.cpu_count() or 4)) as pool:
        list(pool.map(work, jobs))


def ways_of(x: Tensor, residual: Tensor | None, found: list[Tiles], quantization: str | None) -> dict[str, Run]:
    """Name -> how to run a product on these inputs. "F.linear" is the library's product without its neighbours."""

    def tiled(tiles: Tiles) -> Run:
        return lambda product: product.by_kernel(x, residual, tiles)

    ways = {label(tiles): tiled(tiles) for tiles in found}
    if quantization is None:
        ways["library"] = lambda product: product.by_library(x, residual)
        ways["F.linear"] = lambda product: torch.nn.functional.linear(x, product.weight.stored)
    return ways


def label(tiles: Tiles) -> str:
    shape = f"{tiles.block_n}x{tiles.block_k}/{tiles.split_k}"
    return f"{shape} w{tiles.num_warps} s{tiles.num_stages} p{tiles.prefetch}/{tiles.line} r{tiles.release}"


def measure(shape: Shape, row_counts: list[int], quantization: str | None, options: argparse.Namespace) -> list[dict]:
    copies = products(shape, quantization)
    first, records = copies[0], []
    cases = {
        rows: (*inputs_of(shape, first, rows), tilings(shape, rows, quantization, options.quick)) for rows in row_counts
    }
    jobs = [(first, x, residual, tiles) for x, residual, found in cases.values() for tiles in found]
    first.reserve([tiles for *_, tiles in jobs])
    unique = {(bucket_of(job[1].shape[0]), job[3]): job for job in jobs}
    compile_all(list(unique.values()))
    for rows, (x, residual, found) in cases.items():
        marked = {label(tiles) for tiles in candidates(shape.outputs, shape.inputs, bucket_of(rows), quantization)}
        lines = []
        for name, run in ways_of(x, residual, found, quantization).items():
            record = {"shape": shape.name, "rows": rows, "quantization": quantization, "way": name}
            record |= {"tune": name in marked, "default": name == label(found[0])}
            try:
                got = run(first)
                record["error"] = 0.0 if name == "F.linear" else error_of(shape, first, got, x, residual)
                record["repeats"] = bool(run(first).equal(got))
                record["us"] = microseconds(run, copies, first.num_bytes)
                record["gb_s"] = first.num_bytes / record["us"] / 1e3
            except Exception as error:  # noqa: BLE001 - one bad tiling must not hide the others
                record["failed"] = f"{type(error).__name__}: {str(error)[:160]}"
            lines.append(record)
        show(lines, options)
        records += lines
    return records


def show(records: list[dict], options: argparse.Namespace) -> None:
    """The four best, the default (D) and the library; t marks what Product.tune tries."""
    first = records[0]
    print(f"{first['shape']} {first['quantization'] or ''} M={first['rows']}")
    for record in records:
        if "failed" in record:
            print(f"    FAILED {record['way']}: {record['failed']}")
    timed = sorted((record for record in records if "us" in record), key=lambda record: record["us"])
    for rank, record in enumerate(timed):
        wrong = "  WRONG" if record["error"] > 4 else "" if record["repeats"] else "  NOT THE SAME TWICE"
        if rank < 4 or record["default"] or record["way"] in {"library", "F.linear"} or wrong or options.all:
            mark = ("D" if record["default"] else " ") + ("t" if record["tune"] else " ")
            speed = f"{record['us']:8.2f} us {record['gb_s']:6.0f} GB/s"
            print(f"  {mark} {speed}  err {record['error']:.2f}  {record['way']}{wrong}")
    sys.stdout.flush()


def copy_speed() -> float:
    """GB/s read plus written by a copy: what "memory speed" means here."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 2 * source.numel() / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all records here as JSON")
    parser.add_argument("--quick", action="store_true", help="only the candidates of Product.tune, M = 1, 6, 32")
    parser.add_argument("--all", action="store_true", help="print every tiling, not just the best")
    parser.add_argument("--shapes", default="", help="parts of names, by comma: qkv,1b.down")
    parser.add_argument("--rows", default="", help="numbers of rows, by comma")
    parser.add_argument("--budget", type=float, default=75, help="seconds after which no new shape is begun")
    options = parser.parse_args()
    began, records = time.perf_counter(), []
    names = [name for name in options.shapes.split(",") if name]
    rows = [int(number) for number in options.rows.split(",") if number] or ([1, 6, 32] if options.quick else ROWS)
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}: copy {speed:.0f} GB/s")
    few = [number for number in rows if number <= 16][:1] or rows[:1]
    plan = [(shape, rows, None) for shape in SHAPES] + [(shape, few, None) for shape in ODD]
    plan += [(shape, few, kind) for kind in ("fp8", "int8", "int4") for shape in SHAPES if shape.name.startswith("1b")]
    for shape, counts, quantization in plan:
        if names and not any(name in shape.name for name in names):
            continue
        if time.perf_counter() - began > options.budget:
            print(f"out of time: {shape.name} {quantization or ''} left out")
            continue
        records += measure(shape, counts, quantization, options)
        torch.cuda.empty_cache()
    if options.out:
        result = {"device": torch.cuda.get_device_name(), "copy_gb_s": speed, "records": records}
        options.out.write_text(json.dumps(result, indent=1))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
