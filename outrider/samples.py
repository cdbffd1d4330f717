"""Short texts of several kinds, for whatever must be tried on text before the first request comes."""

from __future__ import annotations

__all__ = ["SAMPLE_PROMPTS"]

SAMPLE_PROMPTS = (
    "Write a short note to a neighbour whose parcel was left at your door. Say where it is and when you are at home.",
    'def mean(values):\n    """Give the arithmetic mean of a list of numbers."""\n',
    "The river rises in the hills above the town, and for most of the year it is no more than a stream. In spring",
)
