"""What is known before anything runs, and why something runs badly: the memory bill, predictions, findings."""

from __future__ import annotations
