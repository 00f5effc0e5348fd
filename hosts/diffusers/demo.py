"""What the demo's small checkpoint asks of those who render with it: its size, and words that it has learnt."""

from __future__ import annotations

import re
from pathlib import Path

# Part of a clone, and of no package.
DEMO_CHECKPOINT = Path(__file__).resolve().parents[2] / "demo_model" / "checkpoint"
DEMO_SIDE = 256  # pixels; it has seen no other size

_WORD = re.compile(r"[A-Za-z]?[a-z]{2,}")  # its captions' own; capitals are a text to be drawn letter by letter


def unknown_words(prompt: str, checkpoint: Path = DEMO_CHECKPOINT) -> list[str]:
    """The words of a prompt that are in no caption of its training, each once: its tokenizer spells them in bytes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer" / "tokenizer.json"))
    spans = [span for span in tokenizer.encode(prompt, add_special_tokens=False).offsets if span[0] < span[1]]
    inside = {start for start, _ in spans}
    found = [match for match in _WORD.finditer(prompt) if not inside.isdisjoint(range(match.start() + 1, match.end()))]
    return list(dict.fromkeys(match.group() for match in found))
