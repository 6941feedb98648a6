"""Make a LoRA adapter for the tiny model: `python make_adapter.py SEED OUT`.

Runs in the engine's environment, which has torch. Loud enough that its answers are not the base
model's; another seed is another adapter.
"""

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

HIDDEN, LAYERS, RANK = 128, 2, 8
TARGETS = ("q_proj", "v_proj")


def make_adapter(seed: int, out: Path) -> None:
    """Write what vLLM wants to find in an adapter's directory."""
    out.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (out / "adapter_config.json").write_text(json.dumps(described))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(LAYERS):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{number}.self_attn.{target}"
            down = torch.randn(RANK, HIDDEN, generator=generator) * 0.2
            up = torch.randn(HIDDEN, RANK, generator=generator) * 0.2
            tensors[f"{name}.lora_A.weight"] = down.to(torch.bfloat16).contiguous()
            tensors[f"{name}.lora_B.weight"] = up.to(torch.bfloat16).contiguous()
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    make_adapter(int(sys.argv[1]), Path(sys.argv[2]))
