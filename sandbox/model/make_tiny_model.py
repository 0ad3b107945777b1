#!/usr/bin/env python3
"""Make a tiny Llama that really runs in SGLang and whose answer is known token by token.

Every layer computes, but its output projections are zero, so the residual stream carries the embedding of the last
token unchanged to the head. The head's row of each token is the embedding of the token before it in SENTENCE: a chat
request is answered with exactly SENTENCE, also with sampling. Weights that were
not loaded, or loaded wrong, cannot give that answer.

Writes config.json, generation_config.json, the tokenizer with its chat template, two safetensors shards and their
index: the same kinds of file as a real checkpoint, about 1 MB in all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCE = "Hello from the sandbox: this tiny model runs on a real SGLang engine, and its answer is known."
TRAINING = [SENTENCE, "What do you say? Say something about GPUs, please.", "user assistant system"] * 4
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, POSITIONS = 256, 2, 4, 2, 256, 2048
SEED = 20260


def make_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|begin|>",
                "eos_token": "<|end|>",
                "pad_token": "<|pad|>",
                "model_max_length": POSITIONS,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
    )
    return tokenizer


def make_weights(folder: Path, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(SEED)
    vocab = tokenizer.get_vocab_size()
    answer = tokenizer.encode(SENTENCE).ids
    if len(set(answer)) != len(answer):
        raise SystemExit(f"a token occurs twice in SENTENCE, so no chain of next tokens exists: {answer}")
    end = tokenizer.token_to_id("<|end|>")
    # The chat template ends every prompt with <|assistant|>, so the answer does not depend on the question.
    chain = [tokenizer.token_to_id("<|assistant|>"), *answer, end]

    embedding = rng.standard_normal((vocab, HIDDEN)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros((vocab, HIDDEN), np.float32)
    # After the final norm the embedding has length sqrt(HIDDEN) = 16, so the right token leads by about 2 * 16.
    head[chain[1:]] = 2.0 * embedding[chain[:-1]]

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float16)

    head_dim = HIDDEN // HEADS
    shards: list[dict[str, np.ndarray]] = [{}, {}]
    shards[0]["model.embed_tokens.weight"] = embedding.astype(np.float16)
    for layer in range(LAYERS):
        prefix, shard = f"model.layers.{layer}.", shards[layer * 2 // LAYERS]
        shard[prefix + "input_layernorm.weight"] = np.ones(HIDDEN, np.float16)
        shard[prefix + "post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float16)
        shard[prefix + "self_attn.q_proj.weight"] = random(HIDDEN, HIDDEN)
        shard[prefix + "self_attn.k_proj.weight"] = random(KV_HEADS * head_dim, HIDDEN)
        shard[prefix + "self_attn.v_proj.weight"] = random(KV_HEADS * head_dim, HIDDEN)
        shard[prefix + "self_attn.o_proj.weight"] = np.zeros((HIDDEN, HIDDEN), np.float16)
        shard[prefix + "mlp.gate_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        shard[prefix + "mlp.up_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        shard[prefix + "mlp.down_proj.weight"] = np.zeros((HIDDEN, INTERMEDIATE), np.float16)
    shards[1]["model.norm.weight"] = np.ones(HIDDEN, np.float16)
    shards[1]["lm_head.weight"] = head.astype(np.float16)

    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for s in shards for t in s.values())},
        "weight_map": {tensor: name for name, s in zip(names, shards, strict=True) for tensor in s},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": INTERMEDIATE,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "head_dim": head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": POSITIONS,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "vocab_size": vocab,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                "bos_token_id": tokenizer.token_to_id("<|begin|>"),
                "eos_token_id": end,
                "pad_token_id": tokenizer.token_to_id("<|pad|>"),
            },
            indent=2,
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model; made when missing")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_weights(folder, make_tokenizer(folder))


if __name__ == "__main__":
    main()
