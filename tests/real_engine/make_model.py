"""Make the tiny model that the real-engine tests serve: `python make_model.py TOKENIZER OUT`.

A Qwen2 of two layers with random weights (3 MB) and the tokenizer and template of the directory
TOKENIZER. Runs in the engine's environment, which has torch; nothing is downloaded. The weights are
drawn from a seeded generator, so every machine makes the same model.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

SEED = 20261129
HIDDEN, LAYERS, HEAD = 128, 2, 64
CONTEXT_TOKENS = 32768


def make_model(tokenizer: Path, out: Path) -> None:
    """Write everything that vLLM wants to find in a model's directory."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, out / name)
    described = json.loads((tokenizer / "tokenizer.json").read_bytes())
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    vocabulary = max([*described["model"]["vocab"].values(), *added.values()]) + 1
    ends = {
        "bos_token_id": added["<|endoftext|>"],
        "eos_token_id": added["<|im_end|>"],
        "pad_token_id": added["<|endoftext|>"],
    }
    (out / "generation_config.json").write_text(json.dumps(ends))
    (out / "config.json").write_text(json.dumps({**shape(vocabulary), **ends}))
    save_file(weights(vocabulary), str(out / "model.safetensors"), metadata={"format": "pt"})


def shape(vocabulary: int) -> dict[str, Any]:
    """The model's dimensions, in Qwen2's words."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": HIDDEN // HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }


def weights(vocabulary: int) -> dict[str, Any]:
    """Random, but loud enough that the most likely token depends on the prompt."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(*size: int, deviation: float) -> Any:
        drawn = torch.randn(*size, generator=generator) * deviation
        return drawn.to(torch.bfloat16).contiguous()

    def ones() -> Any:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": draw(vocabulary, HIDDEN, deviation=1.0),
        "lm_head.weight": draw(vocabulary, HIDDEN, deviation=0.3),
        "model.norm.weight": ones(),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        for part in "qkv":
            name = f"{layer}self_attn.{part}_proj"
            tensors[f"{name}.weight"] = draw(HIDDEN, HIDDEN, deviation=0.12)
            tensors[f"{name}.bias"] = draw(HIDDEN, deviation=0.02)
        tensors[f"{layer}self_attn.o_proj.weight"] = draw(HIDDEN, HIDDEN, deviation=0.12)
        tensors[f"{layer}mlp.gate_proj.weight"] = draw(HIDDEN * 2, HIDDEN, deviation=0.12)
        tensors[f"{layer}mlp.up_proj.weight"] = draw(HIDDEN * 2, HIDDEN, deviation=0.12)
        tensors[f"{layer}mlp.down_proj.weight"] = draw(HIDDEN, HIDDEN * 2, deviation=0.12)
        tensors[f"{layer}input_layernorm.weight"] = ones()
        tensors[f"{layer}post_attention_layernorm.weight"] = ones()
    return tensors


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), Path(sys.argv[2]))
