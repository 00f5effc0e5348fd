"""LoRAs for tests: products of every kind on a tiny transformer, under trainers' names."""

from __future__ import annotations

import torch
from ideogram4_fusion.tests.tiny import StateDict, tiny_config

CONFIG = tiny_config()
RANK, STRENGTH = 4, 0.8
SPLIT = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
OTHERS = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaln_modulation")
MODULE = "layers.1.attention.to_k"  # [128, 128], the second third of the rows of qkv


def pairs(weights: StateDict, split: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> down [rank, in] and up [out, rank]; q, k and v have one each where they are split."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in range(int(CONFIG["num_layers"])):
        for part in (*(SPLIT if split else ("attention.qkv", "attention.o")), *OTHERS):
            fused = part.replace("to_out.0", "o")
            thirds = part.endswith(("to_q", "to_k", "to_v"))
            if thirds:
                fused = "attention.qkv"
            out, inner = weights[f"layers.{layer}.{fused}.weight"].shape
            down = torch.randn(RANK, inner, generator=generator) * 0.05
            found[f"layers.{layer}.{part}"] = down, torch.randn(out // 3 if thirds else out, RANK, generator=generator)
    return found


def peft(prefix: str, changes: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> StateDict:
    return {
        f"{prefix}{module}.lora_{side}.weight": tensor
        for module, both in changes.items()
        for side, tensor in zip("AB", both, strict=True)
    }


def lycoris(kind: str, out: int = 128) -> tuple[StateDict, torch.Tensor]:
    """One layer of LyCORIS for `MODULE`, and what it adds at strength 1."""
    generator = torch.Generator().manual_seed(4)

    def factor(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    if kind == "loha":
        parts = {"w1_a": factor(out, RANK), "w1_b": factor(RANK, 128), "w2_a": factor(out, RANK)}
        parts["w2_b"] = factor(RANK, 128)
        delta = (parts["w1_a"] @ parts["w1_b"]) * (parts["w2_a"] @ parts["w2_b"])
        return {f"transformer.{MODULE}.hada_{name}": tensor for name, tensor in parts.items()}, delta
    parts = {"w1": factor(out // 32, 4), "w2_a": factor(32, RANK), "w2_b": factor(RANK, 32)}
    delta = torch.kron(parts["w1"], parts["w2_a"] @ parts["w2_b"])
    return {f"transformer.{MODULE}.lokr_{name}": tensor for name, tensor in parts.items()}, delta
