"""What benchmarks need and users may want too: synthetic pairs of models of real sizes."""

from __future__ import annotations
