"""The common pre-norm decoder layer with little around its products.

In a decode step of a small model a good part of the time goes into starting operations, not into the products. Where a
layer has the structure of Llama's (Mistral, Qwen2, Qwen3 and many more), its forward is replaced on the instance by one
that starts about half as many. Whether it really is such a layer is not judged by its name: the replacement must ask
for the same attention and give the same numbers as the original on a probe, or the original stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.model.attention import ATTENTION_NAME, Probe, Step, attend, register
from outrider.model.fuse import SharedProductPart
from outrider.model.load import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PreNormLayer", "speed_up_layers"]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_PROBE_TOKENS = 3


class PreNormLayer:
    """``h + attention(norm(h))``, then ``h + mlp(norm(h))``, with rotary positions by halves (2104.09864).

    Args:
        layer: A decoder layer whose query, key and value are one `SharedProduct`. It keeps all modules; this only
            calls them.
    """

    def __init__(self, layer: Any) -> None:
        self._attention = layer.self_attn
        self._original = layer.forward
        self._input_norm, self._output_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._mlp, self._projected = layer.mlp, self._attention.o_proj
        self._shared = self._attention.q_proj.shared
        self._dim = self._attention.head_dim
        self._heads, self._kv_heads, _ = (size // self._dim for size in self._shared.sizes)
        self._query_norm = getattr(self._attention, "q_norm", None)
        self._key_norm = getattr(self._attention, "k_norm", None)

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        step: Step | Probe | None = None,
        **others: Any,
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]; without a step, as transformers would."""
        if step is None or position_embeddings is None or args:
            given = {"position_embeddings": position_embeddings, "step": step, **others}
            return self._original(hidden_states, *args, **given)  # type: ignore[no-any-return]
        query, key, value = self._projections(self._input_norm(hidden_states), position_embeddings)
        out, _ = attend(
            self._attention,
            query,
            key,
            value,
            None,
            scaling=self._attention.scaling,
            sliding_window=getattr(self._attention, "sliding_window", None),
            step=step,
        )
        hidden_states = hidden_states + self._projected(out.flatten(2))
        return hidden_states + self._mlp(self._output_norm(hidden_states))  # type: ignore[no-any-return]

    def _projections(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, hidden] -> rotated query [B, H, T, D] and key, plain value [B, Hkv, T, D]."""
        heads, both = self._heads, self._heads + self._kv_heads
        fused = self._shared.product(x).unflatten(-1, (-1, self._dim))
        turned = fused[:, :, :both]
        if self._query_norm is not None and self._key_norm is not None:
            turned = torch.cat([self._query_norm(fused[:, :, :heads]), self._key_norm(fused[:, :, heads:both])], 2)
        cos, sin = (angle[:, :, None] for angle in angles)
        half = self._dim // 2
        # Rotating by halves negates what comes from the second half: the sign is moved to the sine.
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        turned = torch.addcmul(turned * cos, turned.roll(half, -1), signed)
        query, key = turned[:, :, :heads], turned[:, :, heads:]
        return query.transpose(1, 2), key.transpose(1, 2), fused[:, :, both:].transpose(1, 2)


@torch.inference_mode()
def speed_up_layers(model: PreTrainedModel) -> int:
    """Replace the forward of every layer that the probe lets pass; give how many. Comes after fusing and packing."""
    register()
    replaced = 0
    with attention(model, ATTENTION_NAME):
        for layer in model.modules():
            if _looks_pre_norm(layer):
                faster = PreNormLayer(layer)
                if _agree(layer, faster, model.dtype, model.device):
                    layer.forward = faster
                    replaced += 1
    return replaced


def _looks_pre_norm(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if children.keys() != _LAYER or not isinstance(getattr(children["self_attn"], "head_dim", None), int):
        return False
    inside = dict(children["self_attn"].named_children())
    if inside.keys() not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or not hasattr(children["self_attn"], "scaling"):
        return False
    parts = [inside["q_proj"], inside["k_proj"], inside["v_proj"]]
    return all(isinstance(part, SharedProductPart) for part in parts)


def _agree(layer: nn.Module, faster: PreNormLayer, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether both give the same output on random tokens at random angles, and ask for the same attention."""
    generator = torch.Generator().manual_seed(0)
    config: Any = layer.get_submodule("self_attn").config
    width, dim = config.hidden_size, layer.get_submodule("self_attn").head_dim
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=generator).to(device, dtype)
    angle = torch.randn(1, _PROBE_TOKENS, int(dim) // 2, generator=generator).repeat(1, 1, 2)  # type: ignore[arg-type]
    places = torch.arange(_PROBE_TOKENS, device=device)[None]
    given: dict[str, Any] = {
        "position_embeddings": (angle.cos().to(device, dtype), angle.sin().to(device, dtype)),
        "position_ids": places,
        "attention_mask": None,
        "use_cache": False,
    }
    probes = Probe(), Probe()
    try:
        expected = layer.forward(hidden, step=probes[0], **given)
        got = faster(hidden, step=probes[1], **given)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # another structure after all
        return False
    if not isinstance(expected, Tensor) or probes[0].layers != probes[1].layers or expected.shape != got.shape:
        return False
    # Rotation, attention and two sums round on the way: some roundings of each token's largest number.
    bound = max(4 * torch.finfo(dtype).eps, 1e-5) * expected.abs().amax(-1, keepdim=True).float()
    return bool(((expected.float() - got.float()).abs() <= bound).all())
