"""The same setting as other engines spell it; where one has no equivalent, that is said.

Spellings are those of vLLM's and SGLang's documentation of speculative decoding, and of llama.cpp's server of October
2026, which no longer takes --draft-max.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from outrider.config import Method, methods_of

if TYPE_CHECKING:
    from outrider.tune.prediction import Variant

__all__ = ["equivalents"]

_SGLANG = {
    Method.DRAFT_MODEL: "STANDALONE",
    Method.EAGLE: "EAGLE3",
    Method.DFLASH: "DFLASH",
}


def equivalents(variant: Variant, length: int, draft: str | None) -> dict[str, str]:
    """Give each engine's flags, or why there are none.

    Args:
        variant: What drafts.
        length: Guesses a round.
        draft: The draft's folder or Hub id.
    """
    methods = methods_of(variant.method)
    if methods == (Method.NONE,):
        return dict.fromkeys(("vLLM", "SGLang", "llama.cpp"), "no flags: leave speculation out")
    if len(methods) > 1:
        return {
            "vLLM": "no equivalent: it mixes no methods",
            "SGLang": "no equivalent: it mixes no methods",
            "llama.cpp": _llama(methods, variant, length, draft),
        }
    return {
        "vLLM": _vllm(methods[0], variant, length, draft),
        "SGLang": _sglang(methods[0], variant, length, draft),
        "llama.cpp": _llama(methods, variant, length, draft),
    }


def _vllm(method: Method, variant: Variant, length: int, draft: str | None) -> str:
    if variant.tree is not None:
        return "no equivalent: its drafts are chains"
    config: dict[str, Any] = {"method": str(method), "num_speculative_tokens": length}
    if method is Method.NGRAM:
        config |= {"prompt_lookup_max": 8, "prompt_lookup_min": 1}
    elif method in (Method.DRAFT_MODEL, Method.MEDUSA, Method.EAGLE, Method.DFLASH):
        # Of EAGLE heads, those of the third kind have a name of their own there.
        config |= {"method": "eagle3" if method is Method.EAGLE else str(method), "model": draft}
    elif method not in (Method.SUFFIX, Method.MTP):
        return f"no equivalent of {method}"
    told = f"--speculative-config {shlex.quote(json.dumps(config, ensure_ascii=False))}"
    return told + (' ("eagle" for heads of EAGLE-1 and 2)' if method is Method.EAGLE else "")


def _sglang(method: Method, variant: Variant, length: int, draft: str | None) -> str:
    alone = {  # without a draft to be named; MTP's module lies in the target
        Method.NGRAM: f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {length} (on a GPU only)",
        Method.MTP: f"--speculative-algorithm EAGLE {_steps(length)}",
    }
    if method not in _SGLANG:
        return alone.get(method, f"no equivalent of {method}")
    flags = f"--speculative-algorithm {_SGLANG[method]} --speculative-draft-model-path {shlex.quote(str(draft))}"
    if method is Method.DFLASH:
        return f"{flags} --speculative-num-draft-tokens {length + 1}"  # its block counts the token before them
    older = " (EAGLE for heads of EAGLE-1 and 2)" if method is Method.EAGLE else ""
    if variant.tree is None:
        return f"{flags} {_steps(length)}{older}"
    if method is Method.EAGLE:
        tree = f"--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens {length}"
        return f"{flags} {tree}{older}"
    return "no equivalent: its draft models guess chains"


def _steps(length: int) -> str:
    """A chain: one way on after each guess; the tokens verified are the guesses and the one before them."""
    return f"--speculative-num-steps {length} --speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}"


def _llama(methods: tuple[Method, ...], variant: Variant, length: int, draft: str | None) -> str:
    """Lookup and a draft go together there."""
    types = {
        Method.NGRAM: "ngram-simple",
        Method.DRAFT_MODEL: "draft-simple",
        Method.EAGLE: "draft-eagle3",
        Method.MTP: "draft-mtp",
    }
    if variant.tree is not None:
        return "no equivalent: its drafts are chains"
    if not set(methods) <= set(types):
        return f"no equivalent of {variant.method}"
    flags = [f"--spec-type {','.join(types[method] for method in methods)}"]
    if Method.NGRAM in methods:  # its own defaults look for 12 equal tokens, and copy 48
        flags.append(f"--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {length}")
    if methods != (Method.NGRAM,):
        if draft is not None:
            flags.append(f"--spec-draft-model {shlex.quote(draft)}")
        flags.append(f"--spec-draft-n-max {length} (all models as GGUF)")
    return " ".join(flags)
