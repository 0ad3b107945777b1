"""Inputs that the planner's tests share: the documented box, an NVLink host, the sandbox, and models as ``model_info``
returns them."""

from __future__ import annotations

import copy
from typing import Any

PATCHES = [
    "kimi-k25-eagle3",
    "sm120-allreduce-fusion",
    "eagle3-aux-capture",
    "sm120-symm-mem",
    "spec-disable-batch-threshold",
]

KIMI_TEXT: dict[str, Any] = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "torch_dtype": "bfloat16",
}
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": KIMI_TEXT,
    "torch_dtype": "bfloat16",
}
DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "intermediate_size": 18432,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 262144,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
    "torch_dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def gpu(index: int, name: str, memory_mib: int, compute_cap: str) -> dict[str, Any]:
    """One GPU as gpu_host_info returns it."""
    return {
        "index": index,
        "name": name,
        "uuid": f"GPU-{index}",
        "memory_total_mib": memory_mib,
        "memory_used_mib": 0,
        "compute_cap": compute_cap,
        "pci_bus_id": f"00000000:{index:02X}:00.0",
        "mig": False,
        "driver_version": "590.48.01",
    }


def host(
    count: int = 8,
    name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    memory_mib: int = 97887,
    compute_cap: str = "12.0",
    topology: str = "pcie",
) -> dict[str, Any]:
    """A host; without arguments the documented box."""
    return {
        "gpus": [gpu(index, name, memory_mib, compute_cap) for index in range(count)],
        "links": {"topology": topology if count > 1 else "none"},
        "driver": {"loaded": "590.48.01", "installed": "590.48.01"},
        "memory": {"total_mib": 1031000, "available_mib": 1000000, "shm_mib": 515500},
        "cpus": {"count": 128},
        "kernel": "6.8.0-90-generic",
        "init_system": "systemd",
    }


def h200(count: int = 8) -> dict[str, Any]:
    """GPUs linked by NVLink."""
    return host(count, "NVIDIA H200", 143771, "9.0", "nvlink")


def cpu_host() -> dict[str, Any]:
    """The sandbox: no GPU."""
    return {
        "gpus": [],
        "links": {"topology": "none"},
        "driver": {"loaded": None, "installed": None},
        "memory": {"total_mib": 24064, "available_mib": 20000, "shm_mib": 64},
        "cpus": {"count": 2},
    }


def model(config: dict[str, Any], weights_bytes: int, path: str = "/data/model") -> dict[str, Any]:
    """A model as model_info returns it."""
    return {
        "path": path,
        "config": copy.deepcopy(config),
        "weights_bytes": weights_bytes,
        "index_total_bytes": weights_bytes,
    }


def models(target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None) -> dict[str, Any]:
    """Target and draft; without arguments those of the documented box."""
    return {
        "target": model(target or KIMI, 547_000_000_000 if target is None else 16_000_000_000, "/data/kimi-k2.5"),
        "draft": model(draft or DRAFT, 2_400_000_000, "/data/eagle3/output_100k_sglang/4"),
    }


def wanted(**changes: Any) -> dict[str, Any]:
    """The wanted deployment of the documented box, with changes."""
    return {
        "model_path": "/data/kimi-k2.5",
        "draft_model_path": "/data/eagle3/output_100k_sglang/4",
        "served_model_name": "kimi-k2.5",
        "patches": list(PATCHES),
        **changes,
    }


def sandbox(**changes: Any) -> dict[str, Any]:
    """The wanted deployment of the sandbox."""
    return {"profile": "cpu", "model_path": "/srv/tiny", "served_model_name": "tiny", "torch_cuda": "none", **changes}
