"""rich's console and tables; where rich is not installed (a bare GPU machine), plain text that says the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

__all__ = ["Console", "PlainConsole", "PlainTable", "Table"]

TAG = re.compile(r"\[/?(?:bold|red|green|yellow|dim)\]")


class PlainConsole:
    """Prints without colours."""

    def __init__(self, **_: Any) -> None:
        """Takes what rich's console takes."""

    def print(self, *objects: Any, **_: Any) -> None:
        """Print text or tables, markup left out."""
        print(*(TAG.sub("", str(one)) for one in objects), flush=True)


class PlainTable:
    """Columns padded with blanks."""

    def __init__(self, title: str = "", **_: Any) -> None:
        self._title = title
        self._rows: list[tuple[str, ...]] = []
        self._columns: list[tuple[str, bool]] = []

    def add_column(self, name: str, *, justify: str = "left", **_: Any) -> None:
        """Add a column; figures stand at the right."""
        self._columns.append((name, justify == "right"))

    def add_row(self, *cells: str, **_: Any) -> None:
        """Add a row, a cell a column."""
        self._rows.append(tuple(TAG.sub("", cell) for cell in cells))

    def __str__(self) -> str:
        rows = [tuple(name for name, _ in self._columns), *self._rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, (_, right) in zip(row, widths, self._columns, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self._title, *lines])


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
else:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        Console, Table = PlainConsole, PlainTable
