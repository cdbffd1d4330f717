"""Generate with the default model, with and without guesses, and see that only the time differs.

Run it after `scripts/setup`: ``.venv/bin/python examples/quickstart.py``. A Hub id, a folder or a GGUF file in
``LLM(...)`` runs another model, and ``speculative_model=`` a draft for it.
"""

from __future__ import annotations

from outrider import LLM, SamplingParams

LINES = """\
alice,  31, Lisbon
bob,    27, Oslo
carmen, 44, Quito
"""


def main() -> None:
    """Ask for a text that repeats much of its prompt, which is where lookup gains most."""
    messages = [{"role": "user", "content": f"Copy this table, then add one more line like these:\n\n{LINES}"}]
    plain = SamplingParams(max_tokens=64, temperature=0.0, speculation="off")
    guessed = SamplingParams(max_tokens=64, temperature=0.0)

    with LLM(method="ngram") as llm:
        llm.chat(messages, SamplingParams(max_tokens=2))  # the first pass of a process is slow: not timed
        without = llm.chat(messages, plain)[0]
        with_guesses = llm.chat(messages, guessed)[0]

        print(with_guesses.text)
        print()
        print(f"same tokens: {with_guesses.token_ids == without.token_ids}")
        print(f"plain:       {without.stats.rounds} passes of the model, {without.stats.seconds:.2f} s")
        print(f"with lookup: {with_guesses.stats.rounds} passes of the model, {with_guesses.stats.seconds:.2f} s")

        # Sampling is the same with guesses, too: one seed, one text.
        for speculation in ("off", "auto"):
            params = SamplingParams(max_tokens=24, temperature=0.8, seed=7, speculation=speculation)
            print(f"{speculation:>4}: {llm.chat([{'role': 'user', 'content': 'Name a colour.'}], params)[0].text!r}")


if __name__ == "__main__":
    main()
