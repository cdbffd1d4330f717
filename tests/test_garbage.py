"""Collections of garbage while texts are made: a full one walked over all that was loaded, 0.3 s on an H200's host."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from outrider import LLM, SamplingParams
from outrider.garbage import INTERPRETERS_OWN, only_new_garbage
from tests.tiny import byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator


class Knot:
    """Garbage that nothing but the collector finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_there_before_is_left_alone_and_looked_at_again_afterwards() -> None:
    old = Knot()
    ended = weakref.ref(old)
    with only_new_garbage():
        new = weakref.ref(Knot())
        del old
        gc.collect()
        assert new() is None
        assert ended() is not None
    gc.collect()
    assert ended() is None


def test_generating_leaves_the_collector_as_it_was_also_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), device="cpu", max_model_len=64) as llm:
        step, frozen = llm.engine.step, []

        def watched() -> None:
            frozen.append(gc.get_freeze_count())
            step()

        monkeypatch.setattr(llm.engine, "step", watched)
        llm.generate([[65, 66]], SamplingParams(max_tokens=4, temperature=0))
        assert frozen
        assert min(frozen) > INTERPRETERS_OWN
        assert gc.get_freeze_count() == 0

        def broken() -> None:
            raise RuntimeError("a step failed")

        monkeypatch.setattr(llm.engine, "step", broken)
        with pytest.raises(RuntimeError, match="a step failed"):
            llm.generate([[65, 66]], SamplingParams(max_tokens=4, temperature=0))
        assert gc.get_freeze_count() == 0


def test_what_the_interpreter_has_frozen_as_it_started_is_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 does: nothing was kept out of collections there, a quarter of a second each on an H200's host."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    froze: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: froze.append(True))
    with only_new_garbage():
        assert froze


def test_what_the_caller_has_frozen_stays_so() -> None:
    """And nothing else is: how many are frozen is no sign, since one may go whenever nobody holds it any more."""
    old = Knot()
    frozen = weakref.ref(old)
    gc.freeze()
    new = Knot()
    free = weakref.ref(new)
    with only_new_garbage():
        del old, new
        gc.collect()
        assert free() is None
    gc.collect()
    assert frozen() is not None
