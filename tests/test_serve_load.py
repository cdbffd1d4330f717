"""The arithmetic of load and long runs on made-up figures, defeats included, and clients against a made-up server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys

import pytest

from benchmarks.load_client import Reply, closed_loop, figures, percentile
from benchmarks.load_figures import OFFLINE, OURS, PEER, goals, goals_table, interference_table, load_table, paired
from benchmarks.raw_client import Answer, ask
from benchmarks.soak_fuzz import damaged
from benchmarks.soak_watch import Pulse, Verdicts, back, group_members, reading, slope


def cell(engine, speculation, clients, rate, repeat=1, failed=()):
    waits = {
        f"{name}_{share}": 0.01
        for name in ("first_token", "gap", "per_token", "end_to_end")
        for share in ("p50", "p99")
    }
    where = {"engine": engine, "speculation": speculation, "clients": clients, "repeat": repeat}
    return where | {"rate": rate, "failed": list(failed)} | waits


def found(cells, clients=(1, 4, 16)):
    return {goal["name"]: (goal["value"], goal["reached"]) for goal in goals(cells, clients)}


def test_ratios_compare_cells_of_one_repeat_and_take_the_median():
    cells = [cell(OURS, "auto", 4, rate, repeat) for repeat, rate in enumerate((20, 40, 90))]
    cells += [cell(OURS, "off", 4, rate, repeat) for repeat, rate in enumerate((10, 10, 30))]
    assert paired(cells, (OURS, "auto"), (OURS, "off"), 4) == pytest.approx(3)
    assert paired(cells, (OURS, "auto"), (OURS, "off"), 16) is None


def test_goals_can_be_reached_and_missed():
    for ours, alone, peer, reached in ((130, 131, 100, True), (90, 131, 100, False)):
        cells = [cell(OURS, kind, many, ours) for many in (1, 4, 16) for kind in ("auto", "off")]
        cells += [cell(OFFLINE, kind, 16, alone) for kind in ("auto", "off")]
        cells += [cell(PEER, "auto", many, peer) for many in (1, 4, 16)]
        told = found(cells)
        assert told["beside vLLM's speculation, 4 clients"] == (pytest.approx(ours / 100), reached)
        assert told["share lost to the server, auto, 16 clients"] == (pytest.approx(1 - ours / alone), reached)
        assert told["beside own plain, 1 clients"] == (pytest.approx(1), True)
    slower = [cell(OURS, "auto", 1, 99), cell(OURS, "off", 1, 100)]
    assert found(slower, (1,))["beside own plain, 1 clients"] == (pytest.approx(0.99), False)


def test_what_failed_or_was_not_run_is_not_reached():
    cells = [cell(OURS, "auto", 1, 200, failed=["503"]), cell(OURS, "off", 1, 100)]
    told = found(cells, (1,))
    assert set(told.values()) == {(None, None)}
    assert {"share lost to the server, off", "beside vLLM's speculation, 16 clients"} <= set(told)


def test_tables_take_what_runs_leave():
    cells = [cell(OURS, "auto", 1, 10, failed=["503"]), {**cell(OFFLINE, "off", 1, 10), "gap_p50": None}]
    meeting = {"engine": OURS, "speculation": "off", "streams": 2, "prompt": 0, "gap_p50": 0.1, "gap_p99": None}
    for table in (load_table(cells), interference_table([meeting | {"longest": None, "first_token": None}])):
        assert table.row_count
    assert goals_table(goals(cells, (1,))).row_count == 3 + 1 + 2


def test_percentiles_are_values_that_were_seen():
    assert [percentile([3, 1, 2, 4], share) for share in (0.01, 0.5, 0.75, 0.99, 1)] == [1, 2, 3, 4, 4]
    assert percentile([], 0.5) is None


def test_tokens_come_from_usage_and_a_failed_request_counts_for_nothing():
    fine = Reply(
        200, 10.0, [10.5, 10.6, 11.5], 2.0, 21, "abc", {"outrider": {"rounds": 3, "drafted": 9, "accepted": 8}}
    )
    told = figures([fine, Reply(503, 10.0, error="full"), Reply(200, 10.0, [10.1], 0.1, None, error="broke off")], 2.0)
    assert (told["tokens"], told["rate"], told["requests"]) == (21, 10.5, 3)
    assert told["failed"] == ["full", "broke off"]
    assert (told["rounds"], told["drafted"], told["accepted"]) == (3, 9, 8)
    assert told["first_token_p50"] == pytest.approx(0.5)
    assert (told["gap_p50"], told["gap_p99"]) == (pytest.approx(0.1), pytest.approx(0.9))
    assert told["per_token_p50"] == pytest.approx(1.0 / 20)


# --- the two clients against a server that says what it is told to


EVENTS = [
    {"choices": [{"index": 0, "text": "w1", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": " w2", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}},
]


def streams(*, whole=True):
    data = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS[: None if whole else 1]).encode()
    pieces = [data[:20], data[20:50], data[50:], *([b"data: [DONE]\n\n"] if whole else [])]  # borders fall anywhere
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks + (b"0\r\n\r\n" if whole else b"")


def refuses():
    body = json.dumps({"error": {"message": "full", "type": "server_error", "param": None, "code": "x"}}).encode()
    return b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def with_server(answer, work):
    """Run `work(port)` beside a server that gives everybody the same answer; also give how each connection ended."""
    ends = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(size)
        writer.write(answer)
        try:
            await writer.drain()
            if not answer.endswith((b"0\r\n\r\n", b"}")) or b"keep" in head:
                writer.close()
            ends.append(await reader.read())
        except ConnectionError as error:
            ends.append(type(error))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        result = await work(server.sockets[0].getsockname()[1])
        await asyncio.sleep(0.05)
    return result, ends


def test_both_clients_read_a_stream_alike():
    async def work(port):
        replies, _ = await closed_loop(f"http://127.0.0.1:{port}", [{"prompt": "x"}] * 2, 2)
        return replies, await ask(port, {"prompt": "x"})

    (replies, answer), _ = asyncio.run(with_server(streams(), work))
    assert all(reply.fine and (reply.text, reply.tokens) == ("w1 w2", 7) for reply in replies)
    assert (answer.text, answer.endings, answer.usage["completion_tokens"]) == ("w1 w2", 1, 7)
    assert answer.whole and answer.first is not None and not answer.cut


@pytest.mark.parametrize("answer", [streams(whole=False), refuses()])
def test_a_stream_that_breaks_off_and_a_refusal_are_no_texts(answer):
    async def work(port):
        replies, _ = await closed_loop(f"http://127.0.0.1:{port}", [{"prompt": "x"}], 1)
        return replies[0], await ask(port, {"prompt": "x"})

    (reply, raw), _ = asyncio.run(with_server(answer, work))
    assert not reply.fine and reply.error
    assert raw.error or raw.status == 503
    assert raw.endings in (0, 1)


def test_a_client_hangs_up_as_it_is_told():
    for how, end in (("fin", b""), ("rst", ConnectionResetError)):
        answer, ends = asyncio.run(with_server(streams(whole=False), lambda port, how=how: ask(port, {}, cut=(1, how))))
        assert answer.cut and not answer.whole and answer.text == "w1"
        assert ends in ([end], [b""])


def test_a_whole_answer_is_read_as_a_stream_is():
    body = {"choices": [{"text": "w1 w2", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}
    answer = Answer(status=200, body=json.dumps(body).encode(), whole=True)
    assert (answer.text, answer.endings, answer.usage) == ("w1 w2", 1, {"completion_tokens": 2})
    assert Answer(body=b'data: {"error": {}}\n\ndata: [DONE]\n\n').endings == 1


# --- what long runs watch


def test_live_is_asked_until_the_run_ends():
    async def work(port):
        async with Pulse(port) as pulse:
            await asyncio.sleep(1)
        return pulse

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.drain()
        writer.close()

    async def beside():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await work(server.sockets[0].getsockname()[1])

    verdicts = Verdicts()
    asyncio.run(beside()).judge(verdicts)
    (told,) = verdicts.all
    assert told["oracle"] == "O5" and told["seen"]["probes"] > 0 and not told["seen"]["failures"]


def test_a_slope_is_that_of_the_line_through_the_samples():
    assert slope([(0, 5), (10, 25), (20, 45)]) == pytest.approx(2)
    assert slope([(0, 7), (1, 7), (2, 7)]) == 0
    assert slope([(0, 1), (1, 2)]) is None


def test_memory_files_and_threads_must_come_back():
    verdicts = Verdicts()
    back({"rss": 1000, "files": 10, "threads": 5}, {"rss": 1020, "files": 12, "threads": 5}, verdicts, "")
    assert not verdicts.broken
    back({"rss": 1000, "files": 10, "threads": 5}, {"rss": 1021, "files": 13, "threads": 5}, verdicts, "")
    assert [one["what"].strip() for one in verdicts.broken] == ["rss", "files"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")  # noqa: PTH112
def test_processes_are_read_from_proc():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert group_members(child.pid) == [child.pid]
        found = reading(child.pid)
        assert found["rss"] > 0 and found["files"] >= 3 and found["threads"] >= 1
    finally:
        child.kill()
        child.communicate()
    assert group_members(child.pid) == []


def test_damage_is_the_same_for_a_seed_and_rarely_none():
    one, other = ([damaged(random.Random(seed)) for seed in range(200)] for _ in range(2))
    assert one == other
    assert len({body for _, body in one}) > 150

    def is_json(body):
        try:
            json.loads(body)
        except ValueError:
            return False
        return True

    assert 20 < sum(is_json(body) for _, body in one) < 190
