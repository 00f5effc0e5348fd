"""Damaged copies of safetensors files."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I64", "F64", "BOOL", "XX")
SHAPES: tuple[Any, ...] = ([], [0], [1], [1 << 62, 4], [-1, 2], [1.5], "x", None)
OFFSETS: tuple[Any, ...] = ([0, 0], [1, 0], [-1, 5], [0, 1 << 63], None, [0])
METADATA: tuple[Any, ...] = (
    *({"_quantization_metadata": text} for text in ("{", "null", "[]", '{"layers": {}}', '{"layers": [1]}')),
    {"_quantization_metadata": '{"layers": {"layers.0.attention.qkv": {"format": "nvfp4"}}}'},
    *({"format": "pt"}, {"a": 1}, None, []),
)
ENTRIES: tuple[Any, ...] = (None, [], {}, 5, "s", {"dtype": "BF16"})
STRANGERS = ("encoder.conv_in.weight", "lora_unet_x.lora_up.weight", "a.absmax", "scaled_fp8", "layers.99.x")


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to three changes of the header, or bytes of it flipped, or bytes cut off or added."""
    size = struct.unpack("<Q", content[:8])[0]
    kind = rng.random()
    if kind < 0.12:
        flipped = bytearray(content)
        for _ in range(rng.randrange(1, 6)):
            flipped[rng.randrange(8 + size)] = rng.randrange(256)
        return bytes(flipped)
    if kind < 0.2:
        return content[: rng.randrange(len(content))]
    if kind < 0.24:
        return content + bytes(rng.randrange(1, 40))
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    for name in rng.sample([name for name in header if name != "__metadata__"], rng.randrange(1, 4)):
        _change(header, name, rng)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + content[8 + size :]


def _change(header: dict[str, Any], name: str, rng: random.Random) -> None:
    change = rng.randrange(8)
    if change == 0:
        del header[name]
    elif change == 1:
        header[rng.choice(("model.diffusion_model.", "transformer.", "x.")) + name] = header.pop(name)
    elif change == 2:
        header[name] = {**header[name], "dtype": rng.choice(DTYPES)}
    elif change == 3:
        header[name] = {**header[name], "shape": rng.choice((*SHAPES, header[name]["shape"][::-1]))}
    elif change == 4:
        header[name] = {**header[name], "data_offsets": rng.choice(OFFSETS)}
    elif change == 5:
        header["__metadata__"] = rng.choice(METADATA)
    elif change == 6:
        header[name] = rng.choice(ENTRIES)
    else:
        header[rng.choice(STRANGERS)] = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}


def mutate_data(content: bytes, rng: random.Random) -> bytes:
    """Another value in one tensor: bytes flipped, all of it zeros, ones, or set bits, which are NaN in most dtypes."""
    size = struct.unpack("<Q", content[:8])[0]
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    start, end = (8 + size + offset for offset in rng.choice([span for span in spans if span[0] < span[1]]))
    changed = bytearray(content)
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 9)):
            changed[rng.randrange(start, end)] = rng.randrange(256)
    else:
        first = rng.randrange(start, end)
        last = rng.randrange(first, end) + 1
        changed[first:last] = bytes([rng.choice((0x00, 0x7F, 0x80, 0xFF))]) * (last - first)
    return bytes(changed)
