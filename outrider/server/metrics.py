"""What the server tells Prometheus. Names and meanings are part of the interface: docs/serving.md lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.outputs import SpeculationStats

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
QUICK = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 32, 64)


class Described(NamedTuple):
    """A metric's name (a counter's without ``_total``), type and labels."""

    name: str
    type: str
    labels: tuple[str, ...] = ()


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time for each counter, which nobody asks for
        self.registry = CollectorRegistry()

        self._described: list[Described] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            self._described.append(Described(f"outrider_{name}", "counter", labels))
            return Counter(f"outrider_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            self._described.append(Described(f"outrider_{name}", "gauge"))
            return Gauge(f"outrider_{name}", text, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            self._described.append(Described(f"outrider_{name}", "histogram"))
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "HTTP requests answered", "route", "status")
        self.refused = counter("rejected_requests", "Requests refused for want of room", "reason")
        self.running = gauge("requests_running", "Texts being generated")
        self.waiting = gauge("requests_waiting", "Texts that wait for a place")
        self.queue = histogram("queue_seconds", "From arrival to a place in the engine", SECONDS)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.inter_token = histogram("inter_token_seconds", "Between tokens of a text, on average", QUICK)
        self.request_seconds = histogram("request_seconds", "From arrival to the last token", SECONDS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.generated_tokens = counter("generated_tokens", "Tokens of texts")
        self.cached_tokens = counter("cached_prompt_tokens", "Tokens of prompts found in the prefix cache")
        self.cache_usage = gauge("kv_cache_usage_ratio", "Share of cache blocks that texts hold")
        self.drafted = counter("draft_tokens", "Guesses that the target judged")
        self.accepted = counter("accepted_tokens", "Guesses that it agreed with")
        self.accepted_at = counter(
            "accepted_tokens_per_position", "Guesses that it agreed with, by place in the chain", "position"
        )
        self.rounds = counter("rounds", "Passes of the target that gave a text tokens, over all texts")
        self.tokens_per_round = histogram("tokens_per_round", "Tokens a pass gave a text, on its average", LENGTHS)
        self.draft_length = histogram("draft_length", "Guesses a round, on a text's average", LENGTHS)
        self.draft_seconds = counter("draft_seconds", "Time in drafters, where the host waits for it")
        self.verify_seconds = counter("verify_seconds", "Time in the target's passes, where the host waits for it")
        self.host_seconds = counter("host_seconds", "Time in steps of the engine, all of it")
        self.rests = counter("speculation_rests", "Rounds of a text for which no guesses were asked for")
        self.preemptions = counter("preemptions", "Texts sent back to the queue for want of memory")
        self.out_of_memory = counter("out_of_memory", "Steps that ran out of memory and were tried again")
        self.degraded = gauge("speculation_degraded", "1 where the drafter failed and is left out")
        self.verified = counter("verified_texts", "Texts that were run again without guesses, and came out the same")
        self.mismatched = counter("mismatched_texts", "Texts that came out otherwise")
        self.verify_dropped = counter("verify_dropped_texts", "Chosen texts that could not be run again", "reason")
        self.verify_skipped = counter("verify_skipped_texts", "Chosen texts that show nothing", "reason")
        self._seen: dict[str, float] = {}

    def observe(self, engine: Engine, *, unasked: int = 0) -> None:
        """Take over what the engine counts itself; `unasked` of what it runs are no client's."""
        scheduler, figures = engine.scheduler, engine.figures
        self.running.set(max(0, len(scheduler.running) - unasked))
        self.waiting.set(len(scheduler.waiting))
        self.cache_usage.set(scheduler.cache_usage)
        self.degraded.set(engine.speculator.disabled)
        for name, counted, value in (
            ("draft", self.draft_seconds, figures.propose_seconds),
            ("verify", self.verify_seconds, figures.verify_seconds),
            ("step", self.host_seconds, figures.step_seconds),
            ("preempted", self.preemptions, scheduler.num_preemptions),
        ):
            counted.inc(max(0.0, value - self._seen.get(name, 0.0)))
            self._seen[name] = value

    def queued(self, seconds: float) -> None:
        """Note how long a request waited."""
        self.queue.observe(seconds)

    def finished(self, stats: SpeculationStats) -> None:
        """Count a text that has ended, however it did."""
        self.generated_tokens.inc(stats.tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        self.rounds.inc(stats.rounds)
        for position, count in enumerate(stats.accepted_per_position, 1):
            if count:
                self.accepted_at.labels(str(position)).inc(count)
        if stats.tokens:
            self.first_token.observe(stats.first_token_seconds)
            self.request_seconds.observe(stats.seconds)
            self.tokens_per_round.observe(stats.tokens_per_round)
        if stats.tokens > 1:
            self.inter_token.observe((stats.seconds - stats.first_token_seconds) / (stats.tokens - 1))
        if stats.rounds:
            self.draft_length.observe(stats.drafted / stats.rounds)
            self.rests.inc(stats.rounds - (stats.drafted_per_position[0] if stats.drafted_per_position else 0))

    def described(self) -> list[Described]:
        """List all metrics."""
        return list(self._described)

    def text(self) -> bytes:
        """Give all of it in Prometheus' format."""
        return generate_latest(self.registry)
