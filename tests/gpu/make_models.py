# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make small random models for a proof on real GPUs: targets whose every next token is known, and a draft that is often right.

    python tests/gpu/make_models.py FOLDER

FOLDER gets `large` and `small` (Llama targets of different KV size), `large-draft` and `small-draft` (EAGLE-3 drafts of them),
and models.json, which says what they answer. Needs numpy, safetensors and tokenizers.

Every layer computes, but its output projections are zero, so the residual stream carries the embedding of the last token to the
head, whose rows make one fixed token follow each token. The draft sees the same embedding through the hidden states that
EAGLE-3 takes from the target, one token late, and guesses the token after the next: right for SHARE of all tokens, wrong for
the rest. Its second guess of a chain is made from the same hidden state, and so is always wrong: the acceptance length follows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sandbox" / "model"))
from make_tiny_model import SPECIAL, make_tokenizer

SEED = 20260
#: For how many tokens the draft's first guess is right.
SHARE = 0.7
#: name: hidden size, layers, heads, KV heads, MLP size, positions.
SHAPES = {"large": (1024, 16, 16, 8, 2048, 4096), "small": (512, 8, 8, 4, 1024, 4096)}


def next_tokens(vocab: int, first: int, rng: np.random.Generator) -> np.ndarray:
    """What follows each token: all tokens from C(first) on form one ring; those before it (special ones) lead into it."""
    ring = rng.permutation(np.arange(first, vocab))
    follows = np.empty(vocab, np.int64)
    follows[ring] = np.roll(ring, -1)
    follows[:first] = ring[:first]
    return follows


def chain(follows: np.ndarray | list[int], token: int, count: int) -> list[int]:
    """The C(count) tokens that the target answers after C(token)."""
    found = []
    for _number in range(count):
        token = int(follows[token])
        found.append(token)
    return found


def acceptance(follows: np.ndarray | list[int], right: np.ndarray | list[bool], first: int) -> float:
    """Tokens a verify step yields with topk 1 and two guesses: one of the target's own, and the first guess where it is right."""
    token, steps, tokens = int(follows[first]), 0, 0
    # Long enough for every token to be the one that the hidden state belongs to.
    while steps < 20 * len(follows):
        gained = 1 + int(right[token])
        for _number in range(gained):
            token = int(follows[token])
        steps, tokens = steps + 1, tokens + gained
    return tokens / steps


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(np.float16)


def _config(shape: tuple[int, ...], vocab: int, layers: int, **more: Any) -> dict[str, Any]:
    hidden, _layers, heads, kv_heads, intermediate, positions = shape
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _save(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict.fromkeys(tensors, name),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def make(folder: Path, name: str) -> dict[str, Any]:
    """One target and its draft; what they answer."""
    shape = SHAPES[name]
    hidden, layers, heads, kv_heads, intermediate, _positions = shape
    width = hidden // heads
    rng = np.random.default_rng([SEED, sorted(SHAPES).index(name)])
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    vocab = make_tokenizer(target).get_vocab_size()
    first = len(SPECIAL)
    follows = next_tokens(vocab, first, rng)
    embedding = rng.standard_normal((vocab, hidden), dtype=np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros((vocab, hidden), np.float32)
    # Several tokens may lead to the same one (the special ones do): their embeddings add up.
    np.add.at(head, follows, 2.0 * embedding)
    tensors = {
        "model.embed_tokens.weight": embedding.astype(np.float16),
        "model.norm.weight": np.ones(hidden, np.float16),
        "lm_head.weight": head.astype(np.float16),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float16),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float16),
            prefix + "self_attn.q_proj.weight": _random(rng, heads * width, hidden),
            prefix + "self_attn.k_proj.weight": _random(rng, kv_heads * width, hidden),
            prefix + "self_attn.v_proj.weight": _random(rng, kv_heads * width, hidden),
            prefix + "self_attn.o_proj.weight": np.zeros((hidden, heads * width), np.float16),
            prefix + "mlp.gate_proj.weight": _random(rng, intermediate, hidden),
            prefix + "mlp.up_proj.weight": _random(rng, intermediate, hidden),
            prefix + "mlp.down_proj.weight": np.zeros((hidden, intermediate), np.float16),
        }
    _save(target, tensors, _config(shape, vocab, layers, architectures=["LlamaForCausalLM"]))

    right = rng.random(vocab) < SHARE
    after_next = follows[follows]
    guess = np.where(right, after_next, follows[after_next])
    draft_head = np.zeros((vocab, hidden), np.float32)
    np.add.at(draft_head, guess, 2.0 * embedding)
    # Of the three hidden states that EAGLE-3 hands over, the first is taken as it is.
    take_first = np.zeros((hidden, 3 * hidden), np.float16)
    take_first[np.arange(hidden), np.arange(hidden)] = 1
    draft = {
        "fc.weight": take_first,
        "midlayer.hidden_norm.weight": np.ones(hidden, np.float16),
        "midlayer.input_layernorm.weight": np.ones(hidden, np.float16),
        "midlayer.post_attention_layernorm.weight": np.ones(hidden, np.float16),
        "midlayer.self_attn.q_proj.weight": _random(rng, heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": _random(rng, kv_heads * width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": _random(rng, kv_heads * width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": np.zeros((hidden, heads * width), np.float16),
        "midlayer.mlp.gate_proj.weight": _random(rng, intermediate, hidden),
        "midlayer.mlp.up_proj.weight": _random(rng, intermediate, hidden),
        "midlayer.mlp.down_proj.weight": np.zeros((hidden, intermediate), np.float16),
        "norm.weight": np.ones(hidden, np.float16),
        "lm_head.weight": draft_head.astype(np.float16),
        "d2t": np.zeros(vocab, np.int64),
    }
    config = _config(shape, vocab, 1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=vocab)
    _save(folder / f"{name}-draft", draft, config)
    return {
        "target": str(target),
        "draft": str(folder / f"{name}-draft"),
        "follows": follows.tolist(),
        "first": first,
        "share": float(np.mean(right)),
        "acceptance": round(acceptance(follows, right, first), 3),
        "weights_bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def make_all(folder: Path) -> dict[str, Any]:
    made = {name: make(folder, name) for name in SHAPES}
    (folder / "models.json").write_text(json.dumps(made))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, model in make_all(parser.parse_args().folder.resolve()).items():
        print(f"{name}: {model['weights_bytes'] / 1e6:.0f} MB, acceptance length {model['acceptance']}")


if __name__ == "__main__":
    main()
