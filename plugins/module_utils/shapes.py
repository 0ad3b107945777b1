"""What the planner needs to know of a model and of a host, read from what the modules return.

Both are read tolerantly: a key that is missing stays ``None`` and is named in ``missing``; the rule that needs it
decides.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .settings import as_dict, as_list, is_int, is_number

#: Architectures that 0.5.9 runs with one latent KV vector a token instead of heads (``configs/model_config.py:417``).
MLA_ARCHITECTURES = frozenset(
    (
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLMNextN",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "LongcatFlashForCausalLM",
        "LongcatFlashForCausalLMNextN",
        "DotsVLMForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
        "MistralLarge3ForCausalLMEagle",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "MiniCPM3ForCausalLM",
        "DeepseekVL2ForCausalLM",
        "KimiLinearForCausalLM",
        "BailingMoeV2_5ForCausalLM",
    )
)

#: Keys of config.json that hold a model's context length, in the engine's order
#: (``utils/hf_transformers_utils.py:444``).
CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A model as far as memory and rules are concerned. Sizes in bytes, lengths in tokens."""

    path: str
    architecture: str | None
    model_type: str | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    hidden_size: int | None
    vocab_size: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    qk_nope_head_dim: int | None
    q_lora_rank: int | None
    routed_experts: int
    context_length: int | None
    is_mla: bool
    is_multimodal: bool
    has_remote_code: bool
    dtype_bytes: int
    weights_bytes: int | None
    intermediate_size: int
    experts_per_token: int
    moe_intermediate_size: int
    vision: dict[str, Any]
    eagle_layer_ids: list[int] | None
    target_hidden_size: int | None
    missing: tuple[str, ...]


def _whole(mapping: dict[str, Any], *keys: str, least: int = 1) -> int | None:
    """The first of some keys that holds a sensible whole number; a size of zero or less is none."""
    for key in keys:
        value = mapping.get(key)
        if is_int(value) and least <= value < 1 << 62:
            return int(value)
    return None


def context_length(text: dict[str, Any]) -> int | None:
    """The context length the engine derives from a text configuration, with its treatment of rope scaling."""
    scaling = as_dict(text.get("rope_scaling"))
    factor: float = 1
    if scaling and "original_max_position_embeddings" not in scaling and scaling.get("rope_type") != "llama3":
        found = scaling.get("factor", 1)
        factor = float(found) if is_number(found) and 0 < found < 1 << 20 else 1
    for key in CONTEXT_KEYS:
        value = _whole(text, key)
        if value is not None:
            return int(factor * value)
    return None


def model_shape(model: Any) -> ModelShape | None:
    """The shape of a model from what ``model_info`` returns; ``None`` when there is nothing to read."""
    facts = as_dict(model)
    config = as_dict(facts.get("config"))
    if not config:
        return None
    text: dict[str, Any] = config
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            text = as_dict(config[key])
            break
    architectures = as_list(config.get("architectures"))
    architecture = str(architectures[0]) if architectures else None
    is_mla = architecture in MLA_ARCHITECTURES
    heads = _whole(text, "num_attention_heads", "n_head")
    hidden = _whole(text, "hidden_size", "n_embd")
    head_dim = _whole(text, "head_dim")
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads
    kv_heads = _whole(text, "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num") or heads
    eagle = as_dict(config.get("eagle_config"))
    ids: Any = eagle.get("eagle_aux_hidden_state_layer_ids", config.get("eagle_aux_hidden_state_layer_ids"))
    weights = _whole(facts, "index_total_bytes") or _whole(facts, "weights_bytes")
    vision = as_dict(config.get("vision_config"))
    dtype = str(
        text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    )
    values: dict[str, Any] = {
        "architecture": architecture,
        "layers": _whole(text, "num_hidden_layers", "n_layer"),
        "heads": heads,
        "hidden_size": hidden,
        "context_length": context_length(text),
        "weights_bytes": weights,
    }
    if is_mla:
        values |= {"kv_lora_rank": _whole(text, "kv_lora_rank"), "qk_rope_head_dim": _whole(text, "qk_rope_head_dim")}
    experts = _whole(text, "num_experts_per_tok", "moe_topk") or 0
    return ModelShape(
        path=str(facts.get("path") or ""),
        architecture=architecture,
        model_type=str(config["model_type"]) if config.get("model_type") else None,
        layers=values["layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=_whole(text, "v_head_dim") or head_dim,
        hidden_size=hidden,
        vocab_size=_whole(text, "vocab_size"),
        kv_lora_rank=_whole(text, "kv_lora_rank") if is_mla else None,
        qk_rope_head_dim=_whole(text, "qk_rope_head_dim") if is_mla else None,
        qk_nope_head_dim=_whole(text, "qk_nope_head_dim") if is_mla else None,
        q_lora_rank=_whole(text, "q_lora_rank") if is_mla else None,
        routed_experts=_whole(text, "n_routed_experts", "num_experts", "num_local_experts") or 0,
        context_length=values["context_length"],
        is_mla=is_mla,
        is_multimodal=bool(vision),
        has_remote_code=bool(config.get("auto_map") or text.get("auto_map") or facts.get("has_remote_code")),
        dtype_bytes=DTYPE_BYTES.get(dtype.removeprefix("torch."), 2),
        weights_bytes=weights,
        intermediate_size=_whole(text, "intermediate_size") or 0,
        experts_per_token=experts,
        moe_intermediate_size=_whole(text, "moe_intermediate_size") or 0,
        vision=vision,
        eagle_layer_ids=[int(item) for item in ids] if isinstance(ids, list) and all(map(is_int, ids)) else None,
        target_hidden_size=_whole(config, "target_hidden_size"),
        missing=tuple(sorted(key for key, value in values.items() if value is None)),
    )


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in MiB."""

    index: int
    name: str | None
    memory_total_mib: int | None
    compute_cap: tuple[int, int] | None
    mig: bool


@dataclasses.dataclass(frozen=True)
class HostShape:
    """A host as far as planning is concerned. Memory in MiB."""

    gpus: tuple[Gpu, ...]
    topology: str
    driver: str | None
    memory_total_mib: int | None
    cpus: int | None
    knows_gpus: bool
    partial_links: bool = False

    @property
    def compute_cap(self) -> tuple[int, int] | None:
        """The lowest compute capability of the GPUs."""
        known = [gpu.compute_cap for gpu in self.gpus if gpu.compute_cap]
        return min(known) if known else None

    @property
    def gpu_memory_mib(self) -> int | None:
        """The smallest GPU memory: the engine plans for the smallest too."""
        known = [gpu.memory_total_mib for gpu in self.gpus if gpu.memory_total_mib]
        return min(known) if known else None


def version(text: Any) -> tuple[int, ...]:
    """The numbers of a version: ``590.48.01`` -> (590, 48, 1); an empty tuple when there are none."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", str(text)) if text is not None else None
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def host_shape(host: Any) -> HostShape:
    """The shape of a host from what ``gpu_host_info`` returns."""
    facts = as_dict(host)
    gpus = []
    for position, item in enumerate(as_list(facts.get("gpus"))):
        gpu = as_dict(item)
        capability = version(gpu.get("compute_cap"))
        index = _whole(gpu, "index", least=0)
        gpus.append(
            Gpu(
                index=position if index is None else index,
                name=str(gpu["name"]) if gpu.get("name") else None,
                memory_total_mib=_whole(gpu, "memory_total_mib"),
                compute_cap=(capability[0], capability[1]) if len(capability) >= 2 else None,
                mig=gpu.get("mig") is True,
            )
        )
    driver = as_dict(facts.get("driver"))
    first = as_dict(next(iter(as_list(facts.get("gpus"))), {}))
    loaded = driver.get("loaded") or driver.get("installed") or first.get("driver_version")
    sizes = as_dict(facts.get("memory"))
    memory = [size for size in (_whole(sizes, "total_mib"), _whole(sizes, "limit_mib")) if size]
    return HostShape(
        gpus=tuple(gpus),
        topology=str(as_dict(facts.get("links")).get("topology") or "unknown"),
        driver=str(loaded) if loaded else None,
        memory_total_mib=min(memory) if memory else None,
        partial_links=as_dict(facts.get("links")).get("partial") is True,
        cpus=_whole(as_dict(facts.get("cpus")), "count"),
        knows_gpus=isinstance(facts.get("gpus"), (list, tuple)),
    )
