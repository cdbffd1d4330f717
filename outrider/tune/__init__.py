"""Finds the best setting for a user's own prompts: a cost model ranks, measurements decide."""

from __future__ import annotations
