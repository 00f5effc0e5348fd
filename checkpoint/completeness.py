"""Every tensor that a transformer must have, and the check that a file has these and no others."""

from __future__ import annotations

from .dimensions import Dimensions
from .expectations import Expectations
from .header import Header
from .layout import ATTENTION_CONFIG, FUSED_PARTS, SPLIT_PARTS, Layout, Naming
from .quantisation import quantised_layers

_SCALAR = ((), (1,))


def linear_shapes(dims: Dimensions, naming: Naming) -> dict[str, tuple[int, int]]:
    """Module name -> [out, in] of the weight of every Linear.

    211 of them for the official model with fused names. Source of the names: Comfy-Org's and diffusers' transformer
    classes, which differ in attention's only.
    """
    hidden, inner = dims.hidden_size, dims.intermediate_size
    shapes = {
        "input_proj": (hidden, dims.in_channels),
        "llm_cond_proj": (hidden, dims.llm_features_dim),
        "t_embedding.mlp_in": (hidden, hidden),
        "t_embedding.mlp_out": (hidden, hidden),
        "adaln_proj": (dims.adaln_dim, hidden),
        "final_layer.linear": (dims.in_channels, hidden),
        "final_layer.adaln_modulation": (hidden, dims.adaln_dim),
    }
    attention = FUSED_PARTS if naming == "fused" else SPLIT_PARTS
    for layer in range(dims.num_layers):
        block = f"layers.{layer}"
        for part in attention:
            shapes[f"{block}.attention.{part}"] = (3 * hidden if part == "qkv" else hidden, hidden)
        shapes[f"{block}.feed_forward.w1"] = (inner, hidden)
        shapes[f"{block}.feed_forward.w2"] = (hidden, inner)
        shapes[f"{block}.feed_forward.w3"] = (inner, hidden)
        shapes[f"{block}.adaln_modulation"] = (4 * hidden, dims.adaln_dim)
    return shapes


def other_shapes(dims: Dimensions, naming: Naming) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of everything that is no Linear's weight: biases, norms, the indicator's embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "llm_cond_norm.weight": (dims.llm_features_dim,),
        "embed_image_indicator.weight": (2, dims.hidden_size),
    }
    for module, (out, _) in linear_shapes(dims, naming).items():
        if ".attention." not in module and ".feed_forward." not in module:
            shapes[f"{module}.bias"] = (out,)
    for layer in range(dims.num_layers):
        for norm in ("attention.norm_q", "attention.norm_k"):
            shapes[f"layers.{layer}.{norm}.weight"] = (dims.attention_head_dim,)
        for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            shapes[f"layers.{layer}.{norm}.weight"] = (dims.hidden_size,)
    return shapes


def check_complete(header: Header, layout: Layout, dims: Dimensions) -> None:
    """Compares names, shapes and dtypes with those that `dims` ask for; tensors outside the prefix are left alone.

    Raises:
        CheckpointError: tensors are missing, unknown, or of a wrong shape or dtype; up to three of each are named.
    """
    prefix = layout.prefix
    found = {name.removeprefix(prefix): info for name, info in header.tensors.items() if name.startswith(prefix)}
    quantised = quantised_layers(header, prefix)
    tensors = Expectations(found)
    for name, shape in other_shapes(dims, layout.naming).items():
        tensors.expect(name, (shape,))
    for module, shape in linear_shapes(dims, layout.naming).items():
        weight = found.get(f"{module}.weight")
        if layout.weights == "comfy_mixed" and weight is not None and weight.dtype in ("U8", "I8"):
            tensors.allow(f"{module}.comfy_quant")
            if weight.dtype == "U8":
                _expect_nvfp4(tensors, module, *shape)
            else:
                tensors.expect(f"{module}.weight", (shape,), ("I8",))
                tensors.expect(f"{module}.weight_scale", ((shape[0], 1), *_SCALAR), ("F32",))
            continue
        if layout.scale is None or weight is None or weight.dtype != "F8_E4M3":
            # Files that keep the sensitive layers in bf16 are complete too.
            tensors.expect(f"{module}.weight", (shape,))
            continue
        tensors.expect(f"{module}.weight", (shape,), ("F8_E4M3",))
        if layout.weights == "fp8_row_wise":
            tensors.expect(f"{module}.{layout.scale}", (shape[:1],), ("F32",))
            tensors.allow(f"{module}.comfy_quant")  # of a file that ComfyUI saved
            continue
        tensors.expect(f"{module}.{layout.scale}", _SCALAR, ("F32",))
        if layout.scale == "scale_weight":
            optional = f"{module}.scale_input"
        else:
            optional = f"{module}.input_scale"
            if module in quantised:
                tensors.allow(f"{module}.comfy_quant")
        if optional in found:
            tensors.expect(optional, _SCALAR, ("F32",))
    if layout.scale == "scale_weight":
        tensors.allow("scaled_fp8")
    for layer in range(dims.num_layers):
        tensors.allow(f"layers.{layer}.{ATTENTION_CONFIG}")
    tensors.settle(
        header,
        prefix,
        "The file is damaged or of another version: download it again, or use "
        "ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4",
    )


def _expect_nvfp4(tensors: Expectations, module: str, out: int, inner: int) -> None:
    """Two values a byte and an e4m3 scale for 16 of them, [out, in / 16] or padded to tiles of 128 x 4."""
    blocks = inner // 16
    padded = -(-out // 128) * 128, -(-blocks // 4) * 4
    tensors.expect(f"{module}.weight", ((out, inner // 2),), ("U8",))
    tensors.expect(f"{module}.weight_scale", ((out, blocks), padded), ("F8_E4M3", "U8"))
    tensors.expect(f"{module}.weight_scale_2", _SCALAR, ("F32",))
