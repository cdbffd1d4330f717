"""The figures of when_it_helps.py, on made-up rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.help_figures import draw, groups, line_table, point

if TYPE_CHECKING:
    from pathlib import Path

RATES = {"auto": [20.0, 30.0, 24.0], "5": [10.0, 10.0, 6.0], "off": [10.0, 10.0, 12.0]}
ACCEPTED = {"auto": 0.7, "5": 0.5, "off": float("nan")}


def test_a_point_compares_settings_turn_by_turn() -> None:
    one = point(0.8, RATES, ACCEPTED, agreement=0.8)
    assert one["speedup"] == {"auto": 2.0, "5": 1.0}
    assert one["lowest"] == {"auto": 2.0, "5": 0.5}
    assert one["highest"] == {"auto": 3.0, "5": 1.0}


def test_what_else_differs_parts_a_line() -> None:
    points = [point(rows, RATES, ACCEPTED, agreement=at) for at in (0.5, 0.8) for rows in (1, 2)]
    assert {name: [one["at"] for one in some] for name, some in groups(points).items()} == {
        "agreement 0.5": [1, 2],
        "agreement 0.8": [1, 2],
    }
    assert list(groups([point(at, RATES, ACCEPTED, agreement=at) for at in (0.5, 0.8)])) == [""]
    assert "rows" in [column.header for column in line_table("rows", points).columns]


def test_every_line_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = {
        "rows": [point(rows, RATES, ACCEPTED, agreement=0.5) for rows in (1, 2)],
        "size": [point(0.1, RATES, ACCEPTED)],
    }
    draw({"lines": lines, "machine": {"cpu": "some CPU"}, "date": "2026-01-02T03:04:05"}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["when-rows.svg", "when-size.svg"]
