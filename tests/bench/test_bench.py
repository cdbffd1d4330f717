"""`outrider bench` on tiny models: what it measures is there, adds up, and fails in the open."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from typer.testing import CliRunner

from outrider import LLM, ConfigError, InvalidRequestError
from outrider.bench import local
from outrider.bench.page import page
from outrider.bench.plan import Plan, engine_arguments, rotated
from outrider.bench.questions import conversations, read_questions, spread
from outrider.bench.run import Outcome, measure_engine
from outrider.bench.summary import losses, measured_cell, spread_of
from outrider.bench.trials import Budget, Reply, Setting, Trial, measured
from outrider.bench.words import parting
from outrider.cli import app
from outrider.prompts import Prompt
from tests.answering import answering
from tests.scripted import ScriptedDrafter, engine_with
from tests.tiny import byte_tokenizer, greedy, save, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

KINDS = {
    "multi_turn_conversation",
    "translation",
    "summarization",
    "question_answering",
    "mathematical_reasoning",
    "retrieval_augmented_generation",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ and three questions."""
    here = tmp_path_factory.mktemp("bench")
    save(tiny_target(), byte_tokenizer(), here / "target")
    save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), here / "draft")
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["abc abc abc abc", "go on"], "reference": []},
        {"prompt": "one two one two one two", "category": "code"},
        {"messages": [{"role": "user", "content": "hi hi hi"}]},
    ]
    (here / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return here


@pytest.fixture(scope="module")
def report(folder: Path) -> tuple[dict[str, Any], str]:
    """One run of everything, and what it wrote to the terminal."""
    pytest.importorskip("matplotlib")
    told = run(
        folder, "--methods", "ngram,draft_model", "-md", str(folder / "draft"), "--num-speculative-tokens", "2",
        "--temperature", "0,0.7", "--concurrency", "2", "--peer", "transformers", "--repeats", "1",
        "--json", str(folder / "out.json"), "--html", str(folder / "out.html"),
    )  # fmt: skip
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found, told.stdout


def run(folder: Path, *arguments: str, code: int = 0) -> Result:
    common = ["-n", "8", "--repeats", "2", "--dataset", str(folder / "questions.jsonl")]
    result = CliRunner().invoke(app, ["bench", str(folder / "target"), *common, *arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


# --- what is asked


def test_builtin_prompts_are_of_the_six_kinds() -> None:
    questions = read_questions("builtin")
    assert {one.kind for one in questions} == KINDS
    assert all(one.later for one in questions if one.kind == "multi_turn_conversation")
    assert {one.kind for one in spread(questions, 6)} == KINDS
    assert len(spread(questions, None)) == len(questions)


def test_every_kind_of_line_is_read(folder: Path) -> None:
    first, second, third = read_questions(str(folder / "questions.jsonl"))
    assert (first.name, first.kind, first.first.text, first.later) == (
        "81", "multi_turn_conversation", "abc abc abc abc", ("go on",),
    )  # fmt: skip
    assert (second.kind, second.first.text) == ("code", "one two one two one two")
    assert third.first.messages == ({"role": "user", "content": "hi hi hi"},)


def test_a_file_commands_no_terminal(tmp_path: Path) -> None:
    """Names and categories are printed in tables; there they stood as they came, escape sequences and all."""
    file = tmp_path / "questions.jsonl"
    lines: list[dict[str, Any]] = [
        {"question_id": "a\x1b[2J", "category": "code\x1b]0;x\x07", "turns": ["hi"]},
        {"id": "b\r", "category": "é x", "prompt": "hi"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    first, second = read_questions(str(file))
    assert (first.name, first.kind) == ("a\ufffd[2J", "code\ufffd]0;x\ufffd")
    assert (second.name, second.kind) == ("b\ufffd", "é x")


@pytest.mark.parametrize("line", ['{"turns": []}', '{"turns": "x"}', "[1]", '{"prompt": 3}', "not json", ""])
def test_other_lines_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"bad\.jsonl"):
        read_questions(str(file))


def test_later_turns_follow_the_models_answers(folder: Path) -> None:
    questions = read_questions(str(folder / "questions.jsonl"))
    asked: list[list[Prompt]] = []

    def answer(prompts: list[Prompt]) -> list[str]:
        asked.append(prompts)
        return ["an answer"] * len(prompts)

    cases = conversations(questions, answer, templated=True)
    assert [len(one) for one in asked] == [1]
    assert [message["content"] for message in cases[1].prompt.messages] == ["abc abc abc abc", "an answer", "go on"]
    raw = conversations(questions, answer, templated=False)
    assert raw[1].prompt.text == "abc abc abc abcan answer\n\ngo on"


# --- settings


def test_plain_is_measured_beside_every_length() -> None:
    plan = Plan(("none", "ngram"), (3, 5))
    assert [one.length for one in plan.settings("ngram")] == ["off", 3, 5, "auto"]
    assert [one.length for one in plan.settings("none")] == ["off"]


def test_turns_rotate_and_miss_nobody() -> None:
    settings = Plan(("ngram",), (3, 5)).settings("ngram")
    turns = list(rotated(settings, 3))
    firsts = [next(setting for repeat, setting in turns if repeat == number) for number in range(3)]
    assert len(set(firsts)) == 3
    assert sorted(turns, key=str) == sorted(((number, one) for number in range(3) for one in settings), key=str)


@pytest.mark.parametrize(
    "wrong", [{"lengths": (0,)}, {"lengths": (65,)}, {"concurrency": (0,)}, {"temperatures": (-1.0,)}, {"repeats": 0},
              {"budget": Budget(max_tokens=1)}],
)  # fmt: skip
def test_plans_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        Plan(("none",), **wrong)


def test_engines_get_no_settings_of_others() -> None:
    base = {"speculative_model": "d", "draft_quantization": "int8", "suffix_corpus": None, "tree": "auto"}
    lookup = engine_arguments(base, "ngram", 5, 2)
    assert lookup["speculative_model"] is None
    assert "draft_quantization" not in lookup
    assert engine_arguments(base, "none", 5, 2)["tree"] is None
    assert engine_arguments(base, "ngram+draft_model", 5, 2)["speculative_model"] == "d"
    with pytest.raises(ConfigError, match="needs a draft"):
        engine_arguments({}, "draft_model", 5, 2)


# --- one trial


def test_a_trial_keeps_so_many_under_way(folder: Path) -> None:
    with LLM(str(folder / "target"), method="ngram", max_num_seqs=4) as llm:
        most = 0
        step = llm.engine.step

        def watched() -> None:
            nonlocal most
            most = max(most, len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting))
            step()

        llm.engine.step = watched  # type: ignore[method-assign]
        prompts = [("a", list(range(10, 20))), ("b", [1, 2, 1, 2, 1]), ("c", [3] * 9), ("a", [4, 5, 6])]
        trial = measured(llm, prompts, Setting("outrider", "ngram", 3, 2, 0.0), Budget(6))
        plain = measured(llm, prompts, Setting("outrider", "ngram", "off", 1, 0.0), Budget(6))
    assert most <= 2
    assert [one.kind for one in trial.replies] == ["a", "b", "c", "a"]
    assert trial.tokens == sum(len(one.output.token_ids) for one in trial.replies if one.output)
    for one, other in zip(trial.replies, plain.replies, strict=True):
        assert one.output is not None
        assert other.output is not None
        assert one.output.token_ids == other.output.token_ids
        assert one.seconds >= (one.first_seconds or 0) > 0
        assert len(other.gaps) == other.tokens - 1  # plain: a delivery a token
    assert trial.parts is not None
    assert 0 < trial.parts[1] <= trial.seconds


def trial_of(setting: Setting, repeat: int, seconds: float, tokens: int = 100) -> Trial:
    return Trial(setting, repeat, seconds, (Reply("k", tokens, seconds, 0.1, (0.1,)),))


def test_speedups_are_taken_turn_by_turn() -> None:
    """A slow moment that hits both halves of a turn leaves its speedup alone."""
    fast, plain = Setting("outrider", "ngram", 3, 1, 0.0), Setting("outrider", "ngram", "off", 1, 0.0)
    cell = measured_cell(
        fast, [trial_of(fast, 0, 1.0), trial_of(fast, 1, 10.0)], [trial_of(plain, 0, 2.0), trial_of(plain, 1, 20.0)]
    )
    assert cell["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert cell["tokens_per_second"] == {"median": 55.0, "min": 10.0, "max": 100.0}
    assert cell["acceptance_rate"] is None  # nobody counted, and nothing is divided by zero
    assert losses([cell]) == []
    slow = measured_cell(fast, [trial_of(fast, 0, 4.0)], [trial_of(plain, 0, 2.0)])
    assert [(one["speedup"], one["steady"]) for one in losses([cell, slow])] == [(0.5, True)]
    assert spread_of([]) is None


def test_a_setting_that_fails_is_kept_with_its_reason(folder: Path) -> None:
    plan, outcome = Plan(("ngram",), (2,), budget=Budget(4), repeats=1, warmup=0), Outcome()
    settings = plan.settings("ngram")
    with LLM(str(folder / "target"), method="ngram") as llm:
        whole = llm.engine.step

        def broken() -> None:
            if any(one.request.params.speculation == 2 for one in llm.engine.scheduler.waiting):
                raise RuntimeError("the card fell off")
            whole()

        llm.engine.step = broken  # type: ignore[method-assign]
        measure_engine(llm, [("k", [1, 2, 3])], settings, plan, outcome)
    cells = outcome.cells(settings)
    assert [one["status"] for one in cells] == ["measured", "failed", "measured"]
    assert "the card fell off" in cells[1]["reason"]


# --- the whole command


def test_all_settings_are_in_the_report(report: tuple[dict[str, Any], str]) -> None:
    found, told = report
    ours = [(one["method"], one["length"], one["temperature"]) for one in found["cells"] if one["engine"] == "outrider"]
    lengths = [
        ("none", "off"),
        *((method, length) for method in ("ngram", "draft_model") for length in ("off", 2, "auto")),
    ]
    assert sorted(map(str, ours)) == sorted(str((*one, heat)) for one in lengths for heat in (0.0, 0.7))
    assert all(one["status"] == "measured" for one in found["cells"])
    for one in found["cells"]:
        if one["engine"] == "outrider" and not one["plain"]:
            assert one["equality"]["guaranteed"]
            assert one["equality"]["equal"] == one["equality"]["texts"] == 4
            assert len(one["kinds"]) == 3
    drafted = next(one for one in found["cells"] if (one["method"], one["length"]) == ("draft_model", 2))
    assert drafted["drafted"] > 0
    assert drafted["acceptance_rate"] + drafted["rejection_rate"] == pytest.approx(1)
    assert len(drafted["acceptance_by_position"]) == 2
    assert 1 <= drafted["tokens_per_round"] <= 3
    assert sum(drafted["time"].values()) == pytest.approx(1)
    assert found["prompts"]["kinds"] == {"multi_turn_conversation": 2, "code": 1, "prompts": 1}
    assert found["memory"]["draft_model"]["draft_weights"] == found["memory"]["none"]["weights"] > 0
    assert "draft_model 2" in told
    assert any("--repeats 3" in note for note in found["notes"])  # it ran with one turn


def test_peers_stand_beside(report: tuple[dict[str, Any], str]) -> None:
    theirs = [one for one in report[0]["cells"] if one["engine"] == "transformers" and one["temperature"] == 0]
    assert [(one["method"], one["length"]) for one in theirs] == [
        ("none", "off"), ("ngram", 2), ("draft_model", 2), ("draft_model", "auto"),
    ]  # fmt: skip
    plain = next(one for one in report[0]["cells"] if one["method"] == "none" and one["engine"] == "outrider")
    assert all(one["tokens"] == plain["tokens"] for one in theirs)
    assert theirs[1]["speedup"] is not None


def test_the_page_is_complete_in_itself(report: tuple[dict[str, Any], str], folder: Path) -> None:
    text = (folder / "out.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 6
    assert "src=" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert "Where it loses" in text
    broken = json.loads(json.dumps(report[0]))
    broken["cells"][2] = {**broken["cells"][2], "status": "failed", "reason": "<no> memory"}
    assert "&lt;no&gt; memory" in page(broken)


def test_exact_mode_gives_each_length_an_engine(folder: Path) -> None:
    run(folder, "--methods", "ngram", "--num-speculative-tokens", "2,3", "--exact", "--repeats", "1", "--json",
        str(folder / "exact.json"), "--num-prompts", "1")  # fmt: skip
    cells = json.loads((folder / "exact.json").read_text(encoding="utf-8"))["cells"]
    assert {2, 3} <= {one["length"] for one in cells}
    assert all(one["status"] == "measured" for one in cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "telepathy"], "method must be one of"),
        (["--methods", "draft_model"], "needs a draft"),
        (["--num-speculative-tokens", "3,x"], "whole numbers"),
        (["--num-speculative-tokens", "99"], "in [1, 64]"),
        (["--temperature", "warm"], "must be numbers"),
        (["--concurrency", "0"], "concurrency"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dataset", "notes.txt"], "builtin or a .jsonl"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--peer", "llama.cpp"], "--peer must be"),
        (["--url", "http://127.0.0.1:9", "--methods", "ngram"], "leave out --methods"),
    ],
)
def test_bad_input_is_told_before_any_model(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "/no/such/model", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "loading" not in result.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    pytest.importorskip("httpx")
    result = CliRunner().invoke(app, ["bench", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "http://127.0.0.1:9" in result.stderr


def test_without_matplotlib_the_page_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys.modules["outrider.cli.bench"], "find_spec", lambda name: None if name == "matplotlib" else object()
    )
    result = CliRunner().invoke(app, ["bench", "/no/such/model", "--html", str(tmp_path / "x.html")])
    assert result.exit_code == 2
    assert "outrider[bench]" in result.stderr


# --- servers


class Chunked(BaseHTTPRequestHandler):
    """Sends 16 tokens, `size` a chunk; tells usage or not."""

    size, usage, ours = 4, True, False
    asked: ClassVar[list[tuple[str | None, dict[str, Any]]]] = []

    def do_GET(self) -> None:
        owner = "outrider" if self.ours else "somebody"
        self._send(json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.headers["authorization"], body))
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": "x " * self.size}}]} for _ in range(16 // self.size)
        ]
        if self.usage:
            told: dict[str, Any] = {"completion_tokens": 16}
            if self.ours:
                told["outrider"] = {"rounds": 8, "drafted": 16, "accepted": 8, "drafted_per_position": [8, 8],
                                    "accepted_per_position": [6, 2]}  # fmt: skip
            events.append({"choices": [], "usage": told})
        data = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
        self._send(data.encode(), "text/event-stream")

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    with answering(Chunked) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_chunks_are_not_tokens(stranger: str, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W01: the same tokens are told however many come in a chunk."""
    pytest.importorskip("httpx")
    monkeypatch.setattr(Chunked, "size", size)
    file = folder / "served.json"
    done = CliRunner().invoke(
        app, ["bench", "--url", stranger, "--dataset", str(folder / "questions.jsonl"), "--repeats", "1", "--json",
              str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (cell,) = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert (cell["tokens"], cell["texts"]) == (64, 4)
    assert cell["speedup"] is None


def test_our_server_is_measured_off_and_auto(stranger: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    monkeypatch.setattr(Chunked, "ours", True)
    monkeypatch.setattr(Chunked, "asked", [])
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    file = folder / "ours.json"
    done = CliRunner().invoke(
        app, ["bench", "--url", stranger, "--dataset", str(folder / "questions.jsonl"), "--repeats", "2",
              "--concurrency", "3", "--json", str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plain, auto = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert (plain["length"], auto["length"]) == ("off", "auto")
    assert auto["acceptance_by_position"] == [0.75, 0.25]
    assert auto["tokens_per_round"] == 2
    assert auto["speedup"]["min"] > 0
    assert auto["equality"]["equal"] == 4
    assert {key for key, _ in Chunked.asked} == {"Bearer a-key"}
    assert {body["speculation"] for _, body in Chunked.asked} == {"off", "auto"}
    turns = [body["messages"] for _, body in Chunked.asked if len(body["messages"]) == 3]
    assert all(one[1] == {"role": "assistant", "content": "x " * 16} for one in turns)


def test_tokens_are_counted_where_usage_is_missing(
    stranger: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("httpx")
    monkeypatch.setattr(Chunked, "usage", False)
    common = ["--url", stranger, "--dataset", str(folder / "questions.jsonl"), "--repeats", "1"]
    blind = CliRunner().invoke(app, ["bench", *common])
    assert blind.exit_code == 2
    assert "no usage" in blind.stderr
    file = folder / "counted.json"
    counted = CliRunner().invoke(app, ["bench", str(folder / "target"), *common, "--json", str(file)])
    assert counted.exit_code == 0, counted.output
    (cell,) = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert cell["tokens"] == 4 * len(byte_tokenizer()("x " * 16).input_ids)


def test_where_texts_part_is_told() -> None:
    first = {"prompt": 1, "token": 7, "words": ["' a'", "' the'"], "gap": 0.01}
    cell = {"title": "ngram 3", "equality": {"texts": 3, "equal": 2, "expected": True, "guaranteed": False,
                                             "first": first}}  # fmt: skip
    told = parting(cell, "bfloat16")
    assert told is not None
    assert "1 of 3 texts part" in told
    assert "(prompt 2) at token 7: plain ' a', speculative ' the', log-probabilities 0.0100 apart" in told
    assert "bfloat16" in told
    cell["equality"] = {**cell["equality"], "guaranteed": True}  # type: ignore[dict-item]
    assert "NOT EQUAL" in (parting(cell, "float32") or "")
    assert parting({"equality": {"texts": 3, "equal": 3}}, None) is None


def test_ctrl_c_keeps_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = local.measure_engine, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        whole(*arguments)

    monkeypatch.setattr(local, "measure_engine", interrupted)
    told = run(folder, "--methods", "ngram", "--num-speculative-tokens", "2", "--num-prompts", "1", code=130)
    assert "interrupted" in told.stdout
    assert "plain" in told.stdout


def test_a_slow_draft_is_shown_to_lose() -> None:
    """W05: perfect guesses that take long lose, and the report says where the time went."""

    class Slow(ScriptedDrafter):
        def propose(self, *arguments: Any, **more: Any) -> Any:
            time.sleep(0.02)
            return super().propose(*arguments, **more)

    prompt = list(b"abc abc")
    text = [*prompt, *greedy(tiny_target(), prompt, 12)]
    with engine_with(Slow([text]), tiny_target(), enable_prefix_caching=False) as llm:
        plan, outcome = Plan(("ngram",), (2,), budget=Budget(12), repeats=1, warmup=0), Outcome()
        settings = plan.settings("ngram")[:2]
        measure_engine(llm, [("k", prompt)], settings, plan, outcome)
    cell = outcome.cells(settings)[1]
    assert cell["acceptance_rate"] == 1
    assert cell["time"]["draft"] > cell["time"]["verify"]
    assert losses([cell])


class Strange(Chunked):
    """Sends whatever a test wants, as a stream."""

    events: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        data = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in self.events) + "data: [DONE]\n\n"
        self._send(data.encode(), "text/event-stream")


@pytest.fixture(scope="module")
def strange() -> Iterator[str]:
    with answering(Strange) as url:
        yield url


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([[1]], "none of a chat's"), ([5], "none of a chat's"), ([{"choices": 5}], "none of a chat's"),
        ([{"choices": ["x"]}], "none of a chat's"), ([{"usage": "much"}], "none of a chat's"),
        ([{"choices": [], "usage": {"completion_tokens": "many"}}], "tells no usage"),
        ([{"choices": None, "usage": None}], "tells no usage"), ([{"error": {"message": "sorry"}}], "sorry"),
    ],
)  # fmt: skip
def test_a_server_that_answers_nonsense_is_told_in_one_line(
    strange: str, events: list[Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("httpx")
    monkeypatch.setattr(Strange, "events", events)
    done = CliRunner().invoke(app, ["bench", "--url", strange, "--dataset", str(folder / "questions.jsonl")])
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit), done.output
    assert message in done.stderr


def test_a_stream_may_hold_any_character(strange: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events end with line breaks alone: a text may hold a line separator as it is."""
    pytest.importorskip("httpx")
    piece = {"choices": [{"delta": {"content": "a\u2028b\u0085c"}}]}
    monkeypatch.setattr(Strange, "events", [piece, {"choices": [], "usage": {"completion_tokens": 3}}])
    file = folder / "any.json"
    arguments = ["--dataset", str(folder / "questions.jsonl"), "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(app, ["bench", "--url", strange, *arguments])
    assert done.exit_code == 0, done.output
    assert "slower" not in done.stdout  # there is nothing to compare with
    (cell,) = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert (cell["status"], cell["tokens"]) == ("measured", 12)
