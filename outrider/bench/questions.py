"""What benchmarks ask: our own prompts in the six kinds of Spec-Bench, or a file's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequestError
from outrider.prompts import Prompt, prompt_of, read_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BUILTIN", "Case", "Question", "conversations", "read_questions", "spread"]

BUILTIN = "builtin"
FILE = Path(__file__).parent / "prompts.jsonl"
# Spec-Bench (2401.07851) takes its conversations from MT-Bench, under that one's eight categories.
CONVERSATIONS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Question:
    """A first prompt, and what the user says after each answer.

    Attributes:
        name: Names it in reports.
        kind: Its category; "prompts" where the file names none.
        first: The prompt.
        later: The user's further turns.
    """

    name: str
    kind: str
    first: Prompt
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One prompt to be measured: a turn of a question, with all that came before it."""

    name: str
    kind: str
    prompt: Prompt


def read_questions(source: str) -> list[Question]:
    """Read "builtin", or a .jsonl file whose lines are Spec-Bench's or hold "prompt" or "messages".

    Spec-Bench's lines (question.jsonl) are read as they are: {"question_id", "category", "turns": [...]}.

    Raises:
        InvalidRequestError: The file cannot be read, or a line is none of these.
    """
    file = FILE if source == BUILTIN else Path(source).expanduser()
    if source != BUILTIN and file.suffix != ".jsonl":
        raise InvalidRequestError(f"--dataset must be {BUILTIN} or a .jsonl file, got {source!r}")
    found = [_question(place, number, line) for number, (place, line) in enumerate(read_objects(file), 1)]
    if not found:
        raise InvalidRequestError(f'{file} holds no prompts: put an object with "turns", "prompt" or "messages" a line')
    return found


def _question(place: str, number: int, found: Any) -> Question:
    prompt, turns = prompt_of(found), found.get("turns") if isinstance(found, dict) else None
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        kind = _shown(found.get("category", "prompts"))
        kind = "multi_turn_conversation" if kind in CONVERSATIONS else kind
        return Question(_shown(found.get("question_id", number)), kind, Prompt(turns[0]), tuple(turns[1:]))
    if prompt is not None:
        return Question(_shown(found.get("id", number)), _shown(found.get("category", "prompts")), prompt)
    raise InvalidRequestError(
        f'{place} must be an object with "turns" (a list of strings), "prompt" (a string) or "messages" (one or more)'
    )


def _shown(name: Any) -> str:
    """Give what tables may print: nothing by which a file could command a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(name))


def spread(questions: Sequence[Question], count: int | None) -> list[Question]:
    """Take `count` questions, from each kind in turn; None takes all."""
    if count is None or count >= len(questions):
        return list(questions)
    kinds: dict[str, list[Question]] = {}
    for one in questions:
        kinds.setdefault(one.kind, []).append(one)
    taken: list[Question] = []
    place = 0
    while len(taken) < count:
        taken += [group[place] for group in kinds.values() if place < len(group)]
        place += 1
    return taken[:count]


def conversations(
    questions: Sequence[Question], answer: Callable[[list[Prompt]], list[str]], *, templated: bool
) -> list[Case]:
    """Give every turn as a prompt; later turns go on from the model's own plain answers.

    Args:
        questions: What to ask.
        answer: Gives the model's plain answers to prompts, all at once.
        templated: Whether the model has a chat template; without one a turn follows the text so far.
    """
    turns: list[list[Case]] = [[Case(one.name, one.kind, one.first)] for one in questions]
    for place in range(max((len(one.later) for one in questions), default=0)):
        going = [number for number, one in enumerate(questions) if len(one.later) > place]
        answers = answer([turns[number][-1].prompt for number in going])
        for number, said in zip(going, answers, strict=True):
            one = questions[number]
            following = _followed(turns[number][-1].prompt, said, one.later[place], templated=templated)
            turns[number].append(Case(f"{one.name}, turn {place + 2}", one.kind, following))
    return [case for group in turns for case in group]


def _followed(before: Prompt, said: str, then: str, *, templated: bool) -> Prompt:
    if not templated:
        return Prompt(f"{before.text}{said}\n\n{then}")
    messages = before.messages or ({"role": "user", "content": before.text},)
    return Prompt(None, (*messages, {"role": "assistant", "content": said}, {"role": "user", "content": then}))
