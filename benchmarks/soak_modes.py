"""Long runs on one server: clients that hang up, steady load, bursts, overload."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchmarks.load_client import percentile
from benchmarks.raw_client import Answer, Cut, ask
from benchmarks.soak_watch import Pulse, back, counted, cpu_seconds, quiet, reading, slope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.load_servers import ServerProcess
    from benchmarks.soak_site import Site

__all__ = ["burst", "disconnects", "overload", "soak"]

TOKENS = 48
ROUTE = {"route": "/v1/completions"}
WARM_UP = 64
REFUSAL_SECONDS = 0.05
SLOPE_BYTES = 1e6 / 3600  # a second
JUDGED_SECONDS = 1800  # a slope over less than that is noise


def disconnects(site: Site) -> None:
    """Hang up on streams, on whole answers and on requests that wait, at a random token, by FIN or RST."""
    count, draws = site.options.count or 10_000, random.Random(site.options.seed)
    with site.started() as server:

        async def one(number: int) -> None:
            if number % 50 == 0:
                site.record["samples"].append({"request": number, **reading(server.process.pid)})
                site.check(number, TOKENS, await ask(server.port, site.body(number, TOKENS)), "a witness")
                return
            cut: Cut = (draws.choice((-1, 0, *range(1, 12))), draws.choice(("fin", "rst")))
            streams = cut[0] > 0 or draws.random() < 0.5
            answer = await ask(server.port, site.body(number, 4 * TOKENS, stream=streams), cut=cut)
            site.outcomes["cut" if answer.cut else answer.error or str(answer.status)] += 1

        async def all_of_them() -> None:
            await _warmed(site, server)
            site.record["samples"] = []
            before = await asyncio.to_thread(reading, server.process.pid)
            known = counted(server, "requests_total", **ROUTE)
            async with Pulse(server.port) as pulse:
                await _at_once(count, 24, one, site)
            quiet(server, site.verdicts, "after the last hung up")
            pulse.judge(site.verdicts)
            back(before, reading(server.process.pid), site.verdicts, "after all of them")
            # A request whose sender was gone before its head was read is not counted by anybody.
            seen = counted(server, "requests_total", **ROUTE) - known
            missed = site.outcomes["cut"] * 0.2
            held = count - missed <= seen <= count
            site.verdicts.hold("O1", "requests the server ended, of those sent", held, sent=count, ended=seen)
            site.check(1, TOKENS, await ask(server.port, site.body(1, TOKENS)), "after all of them")

        asyncio.run(all_of_them())
    site.stopped(server)


def soak(site: Site) -> None:
    """Ask at 70 % of what the server can do for a stated time, in every way, one in ten hanging up."""
    options, draws = site.options, random.Random(site.options.seed)
    samples: list[dict[str, Any]] = []
    pieces: list[tuple[float, float]] = []
    with site.started() as server:

        async def one(number: int) -> None:
            if number % 10 == 9:
                await ask(
                    server.port, site.body(number, TOKENS), cut=(draws.randrange(-1, 8), draws.choice(("fin", "rst")))
                )
                site.outcomes["cut"] += 1
                return
            answer = await ask(server.port, site.body(number, TOKENS, stream=number % 3 > 0))
            if site.check(number, TOKENS, answer, "in the run"):
                pieces.append((time.perf_counter(), answer.seconds))

        async def all_of_it() -> None:
            capacity = await _capacity(site, server)
            await _warmed(site, server)
            before = reading(server.process.pid)
            began = time.perf_counter()
            tasks: set[asyncio.Task[None]] = set()
            number, due, sampled, rested = 0, began, 0.0, began
            async with Pulse(server.port) as pulse:
                while (now := time.perf_counter()) - began < options.seconds:
                    if now - sampled > max(1.0, options.seconds / 200):
                        sampled = now
                        samples.append({"at": now - began, **reading(server.process.pid), "under_way": len(tasks)})
                    if now - rested > 3600:
                        await asyncio.gather(*tasks)
                        await asyncio.to_thread(quiet, server, site.verdicts, f"after {now - began:.0f} s")
                        due = rested = time.perf_counter()
                    if due <= now:
                        number, due = number + 1, due + draws.expovariate(0.7 * capacity)
                        tasks.add(task := asyncio.create_task(one(number)))
                        task.add_done_callback(tasks.discard)
                    await asyncio.sleep(max(0.0, min(due - time.perf_counter(), 0.5)))
                    site.progress(f"{now - began:.0f} of {options.seconds:.0f} s", number)
                await asyncio.gather(*tasks)
            quiet(server, site.verdicts, "after the run")
            pulse.judge(site.verdicts)
            _judge_soak(site, samples, pieces)
            back(before, reading(server.process.pid), site.verdicts, "after the run")

        asyncio.run(all_of_it())
    site.stopped(server)


def _judge_soak(site: Site, samples: list[dict[str, Any]], answers: list[tuple[float, float]]) -> None:
    late = [one for one in samples if one["at"] > samples[-1]["at"] / 3]  # what comes before that is warm-up
    rise = slope([(one["at"], one["rss"]) for one in late])
    long = site.options.seconds >= JUDGED_SECONDS
    held = None if rise is None or not long else rise < SLOPE_BYTES
    site.verdicts.hold("O6", "memory rises by less than 1 MB an hour", held, bytes_an_hour=rise and 3600 * rise)
    third = len(answers) // 3
    first, last = (percentile([seconds for _, seconds in part], 0.99) for part in (answers[:third], answers[-third:]))
    site.record |= {"samples": samples, "p99_first_third": first, "p99_last_third": last}


def burst(site: Site) -> None:
    """Open a thousand connections within a second, each with a short request, then leave it alone; again and again."""
    count, many = site.options.count or 50, site.options.connections
    with site.started() as server:

        async def one(number: int) -> None:
            await asyncio.sleep(number / many)
            answer = await ask(server.port, site.body(number, 8))
            site.outcomes[answer.error or str(answer.status)] += 1
            if answer.status == 200:
                site.check(number, 8, answer, "in a burst")
            else:
                site.verdicts_of_refusal(answer)

        async def all_of_them() -> None:
            await _warmed(site, server)
            await asyncio.gather(*(one(number) for number in range(many)))  # the first one warms up, too
            await asyncio.to_thread(quiet, server, site.verdicts, "after the first burst")
            site.outcomes.clear()
            before, known = reading(server.process.pid), counted(server, "requests_total", **ROUTE)
            async with Pulse(server.port) as pulse:
                for turn in range(count):
                    site.progress(f"burst {turn + 1} of {count}", turn * many)
                    await asyncio.gather(*(one(number) for number in range(many)))
                    await asyncio.to_thread(quiet, server, site.verdicts, f"after burst {turn + 1}")
            pulse.judge(site.verdicts)
            back(before, reading(server.process.pid), site.verdicts, "after all bursts")
            seen = counted(server, "requests_total", **ROUTE) - known
            answered = sum(n for status, n in site.outcomes.items() if status.isdigit())
            site.verdicts.hold("O1", "every request was answered once", answered == count * many == seen, ended=seen)

        asyncio.run(all_of_them())
    site.stopped(server)


def overload(site: Site) -> None:
    """Let requests arrive at 4 and at 16 times what the server can do, whatever becomes of them."""
    draws = random.Random(site.options.seed)
    with site.started() as server:

        async def stage(times: int, capacity: float, peak: float) -> None:
            answers: list[Answer] = []
            known = {name: counted(server, f"{name}_total") for name in ("prompt_tokens", "generated_tokens")}
            used = (time.process_time(), cpu_seconds(server.process.pid))
            began = due = time.perf_counter()
            tasks: set[asyncio.Task[None]] = set()
            number, ends = 0, began + site.options.seconds

            async def one(number: int) -> None:
                answer = await ask(server.port, site.body(number, TOKENS), seconds=300)
                answers.append(answer)
                if answer.status == 200:
                    site.check(number, TOKENS, answer, f"at {times} times capacity")
                else:
                    site.verdicts_of_refusal(answer)

            while (now := time.perf_counter()) < ends:
                if due <= now:
                    number, due = number + 1, due + draws.expovariate(times * capacity)
                    tasks.add(task := asyncio.create_task(one(number)))
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(max(0.0, min(due - time.perf_counter(), ends - now)))
                site.progress(f"{times} times capacity", number)
            cpu = {
                "clients": (time.process_time() - used[0]) / (ends - began),
                "server": (cpu_seconds(server.process.pid) - used[1]) / (ends - began),
            }
            in_time = sum(answer.usage.get("completion_tokens", 0) for answer in answers)
            late = counted(server, "generated_tokens_total") - known["generated_tokens"]
            await asyncio.gather(*tasks)
            await asyncio.to_thread(quiet, server, site.verdicts, f"after {times} times capacity")
            _judge_overload(site, server, times, answers, known, peak, max(in_time, late) / (ends - began))
            site.record[f"at {times} times capacity"]["processors"] = cpu

        async def all_of_it() -> None:
            await _warmed(site, server)
            before = reading(server.process.pid)
            capacity = await _capacity(site, server)
            async with Pulse(server.port) as pulse:
                for times in (4, 16):
                    await stage(times, capacity, capacity * TOKENS)
            pulse.judge(site.verdicts)
            back(before, reading(server.process.pid), site.verdicts, "after all of it")

        asyncio.run(all_of_it())
    site.stopped(server)


def _judge_overload(
    site: Site,
    server: ServerProcess,
    times: int,
    answers: list[Answer],
    known: dict[str, float],
    peak: float,
    rate: float,
) -> None:
    where = f"at {times} times capacity"
    fine = [answer for answer in answers if answer.status == 200]
    refused = [answer.seconds for answer in answers if answer.status in (429, 503)]
    statuses = Counter(answer.error or str(answer.status) for answer in answers)
    site.record[where] = {
        "statuses": statuses, "goodput": rate, "peak": peak, "refusal_p50": percentile(refused, 0.5),
        "refusal_p99": percentile(refused, 0.99),
        "first_token_p99": percentile([answer.first for answer in fine if answer.first is not None], 0.99),
    }  # fmt: skip
    site.verdicts.hold("load", f"goodput is 95 % of the peak {where}", rate >= 0.95 * peak, rate=rate, peak=peak)
    slowest = percentile(refused, 0.99)
    held, what = slowest is None or slowest <= REFUSAL_SECONDS, f"refusals within {REFUSAL_SECONDS} s, p99, {where}"
    site.verdicts.hold("load", what, held if refused else None, p99=slowest, count=len(refused))
    for name, told in (("prompt_tokens", "prompt_tokens"), ("generated_tokens", "completion_tokens")):
        ours = sum(answer.usage.get(told, 0) for answer in fine)
        seen = counted(server, f"{name}_total") - known[name]
        site.verdicts.hold(
            "O7", f"{name}: the server's count is its clients', {where}", ours == seen, ours=ours, its=seen
        )


async def _warmed(site: Site, server: ServerProcess) -> None:
    for _ in range(2):
        answers = [ask(server.port, site.body(number, 4 * TOKENS, stream=number % 2 > 0)) for number in range(WARM_UP)]
        await asyncio.gather(*answers)


async def _capacity(site: Site, server: ServerProcess, seconds: float = 8.0) -> float:
    """Give how many requests a second the server answers when as many as run together ask without a pause."""
    done, began = 0, time.perf_counter()

    async def one(first: int) -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await ask(server.port, site.body(first + done, TOKENS))
            done += 1

    await asyncio.gather(*(one(number) for number in range(2 * site.options.max_num_seqs)))
    capacity = done / (time.perf_counter() - began)
    site.record["capacity"] = capacity
    site.console.print(f"capacity: {capacity:.1f} requests a second of {TOKENS} tokens", style="dim")
    return capacity


async def _at_once(count: int, clients: int, one: Callable[[int], Awaitable[None]], site: Site) -> None:
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await one(number)
            site.progress(f"{number + 1} of {count}", number)

    await asyncio.gather(*(client() for _ in range(clients)))
