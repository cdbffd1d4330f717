"""What users can import, and that importing it costs them nothing before they use it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import outrider

PUBLIC_NAMES = [
    "LLM",
    "CapacityError",
    "ConfigError",
    "Grammar",
    "InvalidRequestError",
    "ModelLoadError",
    "OutriderError",
    "SamplingParams",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "__version__",
    "wrap",
]
HEAVY = ("torch", "transformers", "numpy", "gguf", "accelerate")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_public_names_are_exactly_these() -> None:
    assert outrider.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(outrider, name) is not None


def test_every_error_is_an_outrider_error() -> None:
    errors = [getattr(outrider, name) for name in PUBLIC_NAMES if name.endswith("Error")]
    assert all(issubclass(error, outrider.OutriderError) for error in errors)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = outrider.LLMs


def test_version_is_the_installed_one() -> None:
    try:
        installed = version("outrider")
    except PackageNotFoundError:
        pytest.skip("run from a source tree that is not installed")
    assert outrider.__version__ == installed


@pytest.mark.parametrize("statement", ["import outrider", "from outrider import SamplingParams", "import outrider.cli"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert not modules_after(statement).intersection(HEAVY)


def test_the_engine_itself_loads_no_model_that_nobody_named() -> None:
    loaded = modules_after("from outrider import LLM")
    assert not [name for name in loaded if name.startswith("transformers.models.") and ".modeling_" in name]
