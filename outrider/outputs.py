"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["Completion", "RequestOutput", "SpeculationStats", "StreamChunk", "TokenLogprob", "TokenOrigin"]

TokenOrigin = str  # "accepted", "recovered", "bonus" or "plain"


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of one token and of the likeliest ones at its position.

    Taken from the target's own distribution, before penalties, temperature and filters.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeculationStats:
    """How a text came about. Guesses after the text's end are not counted.

    Attributes:
        rounds: Passes of the target that gave this text tokens.
        drafted: Guesses that the target judged; of a tree, the places that its guesses reached.
        accepted: Guesses it agreed with.
        drafted_per_position, reached_per_position, accepted_per_position: The same by place in the chain: how often a
            guess stood there, how often all guesses before it had been accepted, how often it was accepted.
        tokens: Tokens generated.
        seconds: From the request's arrival to its last token.
        first_token_seconds: From its arrival to its first token.
        lossy: Whether "typical" acceptance may have changed the text.
        by_drafter: Of mixtures: guesses and accepted guesses of each part, by its name. Of a tree all nodes count.
        cached_tokens: Tokens of the prompt that were not computed, since the cache held them already.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    reached_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    lossy: bool = False
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    cached_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted guesses by guesses; 0 where there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one pass of the target gave, on average: 1 without speculation."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Unconditional: how often a guess at this place was accepted, of all guesses there."""
        return _ratios(self.accepted_per_position, self.drafted_per_position)

    @property
    def conditional_acceptance_by_position(self) -> tuple[float, ...]:
        """Conditional: the same, of the guesses whose predecessors had all been accepted."""
        return _ratios(self.accepted_per_position, self.reached_per_position)


def _ratios(parts: tuple[int, ...], wholes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True))


@dataclass(frozen=True)
class Completion:
    """One generated text.

    Attributes:
        index: Which of the request's n samples.
        text: The text after the prompt, cut at a stop string.
        token_ids: All generated ids, the stopping one included.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: The stop string or stop token id that ended it; None for end-of-sequence or length.
        logprobs: One entry a token where asked for.
        origins: How each token came: "accepted" (a guess), "recovered" (in place of a refused guess), "bonus" (after
            a fully accepted chain) or "plain" (no guess was made).
        stats: Rounds, guesses, times.
        error: What went wrong, where finish_reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[TokenOrigin, ...] = ()
    stats: SpeculationStats = SpeculationStats()
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its n texts; `text`, `token_ids`, `stats` and `cached_tokens` are those of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's ids."""
        return self.outputs[0].token_ids

    @property
    def stats(self) -> SpeculationStats:
        """The first sample's figures."""
        return self.outputs[0].stats

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the cache held already when the first sample came."""
        return self.stats.cached_tokens


@dataclass(frozen=True)
class StreamChunk:
    """What one round added to one sample: text that can no longer change, and its ids.

    Attributes:
        text_ends: How far from the beginning of `text` each of its tokens reaches: beyond its end where text might
            begin a stop string, or turned out to be one. Text that waits for a character's rest belongs to a later
            token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[TokenOrigin, ...] = ()
    stats: SpeculationStats | None = None
    error: str | None = None
    text_ends: tuple[int, ...] = ()

    def singles(self) -> list[StreamChunk]:
        """Give the same as one chunk a token; how it ended stands in the last."""
        if len(self.token_ids) < 2:
            return [self]
        last = len(self.token_ids) - 1
        parts = []
        for place, token in enumerate(self.token_ids):
            text, ends = "", self.text_ends
            if ends:
                begin = min(ends[place - 1], len(self.text)) if place else 0
                text = self.text[begin : None if place == last else ends[place]]
                ends = (max(ends[place] - begin, 0),)
            logprobs = None if self.logprobs is None else self.logprobs[place : place + 1]
            whole = self if place == last else StreamChunk(self.index, "", ())
            parts.append(
                replace(
                    whole, text=text, token_ids=(token,), logprobs=logprobs,
                    origins=self.origins[place : place + 1], text_ends=ends,
                )
            )  # fmt: skip
        return parts
