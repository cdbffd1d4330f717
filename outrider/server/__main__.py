"""``python -m outrider.server --model MODEL``: the same as ``outrider serve``."""

from __future__ import annotations

import sys

from outrider.cli import app

if __name__ == "__main__":
    app(["serve", *sys.argv[1:]], prog_name="python -m outrider.server")
