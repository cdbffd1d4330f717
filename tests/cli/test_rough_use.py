"""The command line in rough hands: names with brackets, files that cannot be written, closed ends, odd encodings."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import outrider.cli
from outrider import LLM, ConfigError, InvalidRequestError, ModelLoadError
from outrider.cli import app, console
from outrider.cli.options import ModelOptions
from outrider.cli.values import check_writable
from outrider.model.checkpoint import check_source
from outrider.prompts import read_objects
from outrider.server.settings import ServerSettings
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

if TYPE_CHECKING:
    from click.testing import Result

NAME = "a $x_{ [red][/bold] <b>"  # markup of terminals, of pages and of plots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("rough use")
    save(tiny_target(), byte_tokenizer(), here / "target")
    save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), here / "draft")
    shutil.copytree(here / "target", here / NAME.replace("/", ":"))
    return here


def named(folder: Path) -> str:
    return str(folder / NAME.replace("/", ":"))


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


# --- files


@pytest.mark.parametrize(
    ("command", "option"), [("bench", "--json"), ("bench", "--html"), ("tune", "--output"), ("verify", "--record")]
)
def test_a_file_that_cannot_be_written_is_told_before_any_work(command: str, option: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for file in (tmp_path, tmp_path / "no" / "file", Path("/proc/outrider.out")):  # in /proc not even root may write
        told = run(command, "/no/such/model", option, str(file), code=2).stderr
        assert f"{option} {file} cannot be written" in told
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays_until_there_is_something_to_write(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    check_writable("--json", file)
    assert not list(tmp_path.iterdir())
    file.write_text("old", encoding="utf-8")
    check_writable("--json", file)
    assert file.read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_what_the_system_refuses_is_one_line(error: OSError, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(console.typer.Exit) as left, console.reported(show_traceback=False):
        raise error
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_who_reads_no_further_is_left_to_the_shell() -> None:
    with pytest.raises(BrokenPipeError), console.reported(show_traceback=False):
        raise BrokenPipeError


def test_closed_ends_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "argv", ["outrider", "--version"])
    with pytest.raises(SystemExit) as left:
        outrider.cli.main()
    sys.stdout.close()
    sys.stderr.close()
    assert left.value.code == 0


# --- prompts


def test_lines_end_with_line_breaks_alone(tmp_path: Path) -> None:
    """JSON's strings may hold other separators as they are, and some editors begin a file with a mark."""
    file = tmp_path / "prompts.jsonl"
    texts = ["one\u2028two", "three\u0085four", "five\u2029six"]
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts)
    file.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert [found["prompt"] for _, found in read_objects(file)] == texts


def test_an_empty_prompt_file_is_no_prompt(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n", encoding="utf-8")
    assert "is empty" in run("generate", "-m", str(folder / "target"), "-f", str(file), code=2).stderr


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    with pytest.raises(InvalidRequestError, match="stdin is not utf-8"):
        outrider.cli.generate.read_prompts(None, None, None)


def test_half_a_character_is_refused_by_the_library(folder: Path) -> None:
    with LLM(str(folder / "target"), method="none") as llm:
        for ask in (lambda: llm.generate("x\ud83d"), lambda: llm.chat([{"role": "user", "content": "\ud83d"}])):
            with pytest.raises(InvalidRequestError, match="surrogate"):
                ask()


# --- names and settings


@pytest.mark.parametrize("command", ["generate", "bench", "tune", "verify", "plan", "doctor", "serve"])
def test_an_empty_name_is_not_the_folder_here(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "target")
    prompt = ["hi"] if command == "generate" else []
    more = {"serve": ["--port", "0"], "doctor": ["--files-only"]}.get(command, [])
    assert "empty" in run(command, "-m", "", *prompt, *more, code=2).stderr
    if command != "serve":  # whose draft is loaded with the target
        assert "empty" in run(command, "-m", str(folder / "target"), "-md", " ", *prompt, *more, code=2).stderr


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_missing_target_or_draft_is_told_before_engines_are_loaded(command: str, folder: Path) -> None:
    target = str(folder / "target")
    for arguments in (["/no/such/model"], [target, "-md", "/no/such/draft"]):
        told = run(command, *arguments, code=2).stderr
        assert "no model at /no/such/" in told
        assert "loading" not in told


def test_hub_ids_are_not_looked_for_on_disk() -> None:
    for name in ("owner/name", "name", "owner/name:file.gguf", "default"):
        check_source(name)
    for wrong in ("", " ", "/no/such", "a/b/c", Path("owner/name")):
        with pytest.raises(ModelLoadError):
            check_source(wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--methods", ","), ("bench", "--served-model", "x"), ("bench", "--json", "x", "--html", "x"),
        ("tune", "--budget", "nan"), ("tune", "--budget", "inf"), ("generate", "hi", "--repeat", "2"),
        ("generate", "hi", "--threads", "100000"), ("serve", "--deadline-seconds", "nan"),
        ("serve", "--drain-seconds", "inf"), ("serve", "--served-model-name", " "),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run(*arguments, code=2).stderr
    assert "loading" not in told
    assert any(one.lstrip("-").replace("-", "_") in told.replace("-", "_") for one in arguments[1:])


@pytest.mark.parametrize(
    "name", ["exact", "enable_prefix_caching", "share_prefixes", "suffix_sharing", "allow_failure"]
)
def test_a_switch_is_true_or_false(name: str, tmp_path: Path) -> None:
    """Python takes the text "false" for true."""
    file = tmp_path / "outrider.toml"
    file.write_text(f'{name} = "false"\nmethod = "suffix"\nmodel = "/no/such/model"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="must be true or false, got 'false'"):
        LLM.from_config(file)


@pytest.mark.parametrize(
    "name", ["queue_seconds", "deadline_seconds", "stall_seconds", "header_seconds", "step_seconds"]
)
def test_seconds_are_numbers(name: str) -> None:
    for value in (float("nan"), float("inf"), 0.0):
        settings: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=name):
            ServerSettings(**settings)


@pytest.mark.parametrize("setting", ["draft_dtype", "draft_device"])
def test_what_the_draft_is_to_have_is_checked_before_the_target_is_loaded(setting: str) -> None:
    settings: dict[str, Any] = {setting: "nope"}
    with pytest.raises(ConfigError, match=f"{setting} must be .*'nope'"):
        LLM("/no/such/model", "/no/such/draft", **settings)


@pytest.mark.parametrize("given", [{"method": "telepathy"}, {"speculative_config": '{"method": "telepathy"}'}])
def test_a_method_that_is_none_is_told_by_the_options_alone(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"method must be one of .*'telepathy'"):
        ModelOptions(**given).arguments()


# --- what is shown


def test_brackets_in_names_are_shown_as_they_are(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown, draft = Path(named(folder)).name, str(folder / "draft")
    assert shown in run("doctor", named(folder), "-md", draft, "--files-only", code=1).stdout
    assert shown in run("plan", named(folder), "-md", draft).stdout
    questions, page = tmp_path / "questions.jsonl", tmp_path / "page.html"
    kinds = ["<script>alert(1)</script>", "$\\frac{", "[/red]"]
    questions.write_text(
        "".join(json.dumps({"prompt": "ab", "category": one}) + "\n" for one in kinds), encoding="utf-8"
    )
    arguments = ("--dataset", str(questions), "-n", "3", "--repeats", "1", "--num-speculative-tokens", "1")
    done = run("bench", named(folder), *arguments, "--html", str(page))
    assert shown in done.stdout
    written = page.read_text(encoding="utf-8")
    assert "<script" not in written
    assert "&lt;script&gt;" in written
    assert not [part for part in written.split("http")[1:] if not part.startswith("://www.w3.org/")]  # SVG's names


def test_a_spinner_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    with console.working("loading [/x] [red]", quiet=False):
        pass
    with console.turns(1, quiet=False) as tell:
        tell("[/x] warming up", 0)
    with console.byte_bar("[/x]", quiet=False):
        pass
    assert "loading [/x] [red]" in screen.getvalue()
