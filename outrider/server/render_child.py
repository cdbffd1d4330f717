"""Renders chat templates in a process of its own, which may be killed: a template comes with a checkpoint.

A line of JSON in, a line of JSON out, over pipes. The template runs in transformers' immutable sandbox, which stops it
from reaching into Python but not from looping or from multiplying strings; time is watched by the parent, memory here.
"""

from __future__ import annotations

import json
import resource
import sys

__all__ = ["main"]

MAX_MEMORY = 1 << 30  # bytes beyond what imports took


def main() -> None:
    """Answer until stdin ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a path of anybody's
        taken = max(taken, int(file.read().split()[0]) * resource.getpagesize())
    resource.setrlimit(resource.RLIMIT_AS, (taken + MAX_MEMORY, taken + MAX_MEMORY))
    answers = sys.stdout
    sys.stdout = sys.stderr  # a template's library may print
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        try:
            job = json.loads(line)
            rendered = render_jinja_template(
                conversations=[job["messages"]],
                tools=job["tools"],
                chat_template=job["template"],
                add_generation_prompt=True,
                **job["variables"],
            )
            answer = {"text": rendered[0][0]}
        except Exception as error:  # noqa: BLE001 - whatever a template does is the request's error
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
