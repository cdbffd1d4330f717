"""Who is let in: places are counted before any work is done for a request, and given back in one place."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Self

from outrider.server.errors import ApiError, draining, overloaded

if TYPE_CHECKING:
    from outrider.server.settings import ServerSettings

__all__ = ["Admission", "Ticket"]


class Ticket:
    """Places that one request holds until it is closed; closing twice is harmless."""

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission, self.key, self.places, self.tokens = admission, key, 0, 0
        self._open = True

    def take(self, places: int) -> None:
        """Hold `places` places in all, now that it is known how many it takes.

        Raises:
            ApiError: As `Admission.enter`.
        """
        self._admission.take(self, places)

    def weigh(self, tokens: int) -> None:
        """Count the prompt's tokens, once they are known, against what may wait.

        Raises:
            ApiError: Too many tokens wait already.
        """
        self._admission.weigh(self, tokens)

    def begun(self) -> None:
        """The prompt is being worked on: its tokens wait no longer."""
        self._admission.begun(self)

    def close(self) -> None:
        """Give everything back."""
        if self._open:
            self._open = False
            self._admission.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Admission:
    """Counts texts and waiting prompt tokens; lives on the event loop, so it needs no lock.

    Args:
        settings: The bounds.
        running: Texts that the engine runs together.
    """

    def __init__(self, settings: ServerSettings, running: int) -> None:
        self._settings = settings
        self._most = running + settings.max_waiting
        self._by_key: Counter[str] = Counter()
        self.places = 0
        self.waiting_tokens = 0
        self.draining = False

    @property
    def full(self) -> bool:
        """Whether not even one more text can be let in."""
        return self.places >= self._most

    def refuse(self) -> ApiError:
        """Give the refusal of a full server."""
        return overloaded(f"{self.places} texts are under way, and {self._most} is the most; try again later")

    def enter(self, key: str) -> Ticket:
        """Take a place for one text: each request has one before anything is done for it.

        Raises:
            ApiError: 503 where the server is full or stops, 429 where the key has its share already.
        """
        ticket = Ticket(self, key)
        self.take(ticket, 1)
        return ticket

    def take(self, ticket: Ticket, places: int) -> None:
        """Let a ticket hold `places` places in all; see `Ticket.take`."""
        key, more = ticket.key, places - ticket.places
        if self.draining:
            raise draining()
        own = self._settings.max_per_key
        if own is not None and self._by_key[key] + more > own:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"this key may have {own} texts under way and has {self._by_key[key]}; wait for one to end",
                retry_after=1,
            )
        if self.places + more > self._most:
            raise self.refuse()
        self.places += more
        self._by_key[key] += more
        ticket.places = places

    def weigh(self, ticket: Ticket, tokens: int) -> None:
        """Count a ticket's prompt tokens; a lone prompt is never too much."""
        if self.waiting_tokens and self.waiting_tokens + tokens > self._settings.max_waiting_tokens:
            raise overloaded(
                f"{self.waiting_tokens} prompt tokens wait, and {self._settings.max_waiting_tokens} is the most"
            )
        ticket.tokens += tokens
        self.waiting_tokens += tokens

    def begun(self, ticket: Ticket) -> None:
        """Count a ticket's tokens no longer."""
        self.waiting_tokens -= ticket.tokens
        ticket.tokens = 0

    def leave(self, ticket: Ticket) -> None:
        """Take places back."""
        self.begun(ticket)
        self.places -= ticket.places
        self._by_key[ticket.key] -= ticket.places
        if not self._by_key[ticket.key]:
            del self._by_key[ticket.key]
