"""A benchmark's report as one page that needs nothing else: styles and plots are in it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from outrider.bench.plots import acceptance_plot, latency_plot, speedup_plot
from outrider.bench.words import (
    amount,
    conditions,
    counted,
    memory_words,
    milliseconds,
    parting,
    share,
    times,
    times_range,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd; }
h3 { font-size: 1em; margin-bottom: .2em; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; font-size: .9em; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
.gain { background: #e2f3e5; } .loss { background: #fbe0e0; } .failed { color: #b00020; text-align: left; }
.note { background: #fff6dd; padding: .4em .8em; } .small { color: #666; font-size: .9em; }
svg { max-width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""
COLUMNS = (
    "tokens/s", "least to most", "speedup", "of turns", "accepted", "rejected", "tokens a round", "first token",
    "a token", "p99", "wait", "p99", "whole text", "p99", "time drafting", "equal tokens",
)  # fmt: skip

WAITS = ("per_token", "between_deliveries", "end_to_end")


def page(report: dict[str, Any]) -> str:
    """Give the page. Needs matplotlib."""
    model, plan = report["model"], report["plan"]
    title = f"Speculative decoding: {model['name']}"
    body = [f"<h1>{escape(title)}</h1>", _facts(report)]
    body += [f'<p class="note">{escape(note)}</p>' for note in report["notes"]]
    for temperature in plan["temperatures"]:
        for concurrency in plan["concurrency"]:
            cells = [
                one for one in report["cells"] if (one["temperature"], one["concurrency"]) == (temperature, concurrency)
            ]
            body += _section(cells, conditions(temperature, concurrency), model.get("dtype"))
    body += ["<h2>Where it loses</h2>", _losses(report), "<h2>Memory</h2>", _memory(report)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _facts(report: dict[str, Any]) -> str:
    machine, plan, prompts, model = (report[name] for name in ("machine", "plan", "prompts", "model"))
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in prompts["kinds"].items())
    rows = [
        ("measured", report["when"]),
        (
            "model",
            ", ".join(str(model[name]) for name in ("name", "dtype", "device", "verification") if model.get(name)),
        ),
        ("draft", model.get("speculative_model")),
        ("machine", machine["card"] or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} threads"),
        (
            "versions",
            f"outrider {machine['outrider']}, torch {machine['torch']}, transformers {machine['transformers']}",
        ),
        ("prompts", f"{prompts['count']} from {prompts['source']}: {kinds}"),
        ("each text", f"up to {plan['max_tokens']} tokens, seed {plan['seed']} and up"),
        ("turns", f"{plan['repeats']} of each setting, in an order that rotates"),
        ("warm-up", f"{counted(plan['warmup'], 'prompt')} a setting, not counted"),
    ]
    lines = [f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows if value]
    how = (
        "Figures are medians. A speedup is over plain decoding on the same engine, turn by turn. &ldquo;A token&rdquo; "
        "is the time a token after the first delivery; &ldquo;wait&rdquo; is what a reader waits between deliveries, "
        "and all tokens of a round come in one. Equal tokens: texts whose tokens are those of plain decoding."
    )
    return f'<table>{"".join(lines)}</table>\n<p class="small">{how}</p>'


def _section(cells: Sequence[dict[str, Any]], title: str, dtype: str | None) -> list[str]:
    plots = [
        ("Speedup by method and draft length", speedup_plot(cells)),
        ("Acceptance by position", acceptance_plot(cells)),
        ("Latency: share of texts, and of waits, that took no longer", latency_plot(cells)),
    ]
    found = [f"<h2>{escape(title[0].upper() + title[1:])}</h2>", f'<div class="scroll">{_table(cells)}</div>']
    parted = [told for one in cells if (told := parting(one, dtype)) is not None]
    found += [f'<p class="small">{escape(told)}</p>' for told in parted]
    for name, plot in plots:
        if plot is not None:
            found += [f"<h3>{escape(name)}</h3>", plot]
    kinds = _kinds(cells)
    return found + (["<h3>Speedup by kind of prompt</h3>", kinds] if kinds else [])


def _table(cells: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *COLUMNS))
    return f"<table><tr>{head}</tr>{''.join(map(_row, cells))}</table>"


def _row(cell: dict[str, Any]) -> str:
    title = "plain" if cell["title"] == "none" else cell["title"]
    if cell["status"] == "failed":
        reason = escape(f"failed: {cell['reason']}")
        return f'<tr><td>{escape(title)}</td><td class="failed" colspan="{len(COLUMNS)}">{reason}</td></tr>'
    rate, equality = cell["tokens_per_second"], cell["equality"]
    values = [
        f"{rate['median']:.1f}", f"{rate['min']:.1f} to {rate['max']:.1f}",
        times(cell["speedup"]), times_range(cell["speedup"]),
        share(cell["acceptance_rate"]), share(cell["rejection_rate"]),
        "-" if cell["tokens_per_round"] is None else f"{cell['tokens_per_round']:.2f}",
        milliseconds(cell["first_token"]["p50"]),
        *(milliseconds(cell[name][at]) for name in WAITS for at in ("p50", "p99")),
        "-" if cell["time"] is None or cell["plain"] else share(cell["time"]["draft"]),
        "-" if equality is None else f"{equality['equal']} of {equality['texts']}",
    ]  # fmt: skip
    told = [f"<td>{escape(value)}</td>" for value in values]
    told[2] = f'<td class="{_class(cell["speedup"] and cell["speedup"]["median"])}">{escape(values[2])}</td>'
    return f"<tr><td>{escape(title)}</td>{''.join(told)}</tr>"


def _class(speedup: float | None) -> str:
    return "" if speedup is None else "gain" if speedup >= 1 else "loss"


def _kinds(cells: Sequence[dict[str, Any]]) -> str:
    shown = [one for one in cells if one["status"] == "measured" and not one["plain"]]
    kinds = list(dict.fromkeys(kind for one in shown for kind in one["kinds"]))
    if len(kinds) < 2:
        return ""
    head = "".join(f"<th>{escape(kind.replace('_', ' '))}</th>" for kind in kinds)
    rows = []
    for one in shown:
        told = [one["kinds"].get(kind, {}).get("speedup") for kind in kinds]
        values = [f'<td class="{_class(value)}">{"-" if value is None else f"{value:.2f}"}</td>' for value in told]
        rows.append(f"<tr><td>{escape(one['title'])}</td>{''.join(values)}</tr>")
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _losses(report: dict[str, Any]) -> str:
    if not any(one["status"] == "measured" and not one["plain"] for one in report["cells"]):
        return "<p>Nothing was measured beside plain decoding.</p>"
    failed = [one for one in report["cells"] if one["status"] == "failed"]
    found = [
        f"<tr><td>{escape(one['title'])}</td><td>{escape(conditions(one['temperature'], one['concurrency']))}</td>"
        f"<td>{escape((one['kind'] or 'all prompts').replace('_', ' '))}</td>"
        f'<td class="loss">{one["speedup"]:.2f}x</td>'
        f"<td>{'not in every turn' if one['steady'] is False else ''}</td></tr>"
        for one in report["losses"]
    ]
    told = f"<table>{''.join(found)}</table>" if found else "<p>Nothing that was measured was slower than plain.</p>"
    unknown = "".join(
        f"<li>{escape(one['title'])}, {escape(conditions(one['temperature'], one['concurrency']))}: "
        f"{escape(one['reason'])}</li>"
        for one in failed
    )
    return told + (f"<p>Not measured:</p><ul>{unknown}</ul>" if unknown else "")


def _memory(report: dict[str, Any]) -> str:
    rows = [f"<li>{escape(name)}: {escape(memory_words(told))}</li>" for name, told in report["memory"].items()]
    what = "the process's largest resident set" if not report["machine"]["card"] else "torch's largest allocation"
    note = f'<p class="small">Peak: {what} while the engine was measured.</p>'
    return f"<ul>{''.join(rows)}</ul>{note}" if rows else f"<p>{escape(amount(None))}: another process holds it.</p>"
