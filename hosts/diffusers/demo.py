"""What the demo's small checkpoint asks of those who render with it: its size, and words that it has learnt."""

from __future__ import annotations

import re
from pathlib import Path

# Part of a clone, and of no package.
DEMO_CHECKPOINT = Path(__file__).resolve().parents[2] / "demo_model" / "checkpoint"
DEMO_SIDE = 256  # pixels; it has seen no other size

# Its captions have words of such letters alone; capitals are a text to be drawn letter by letter.
_WORD = re.compile(r"(?<![\w'\u2019])[A-Za-z]?[a-z]{2,}(?![\w'\u2019])")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")  # of JSON


def unknown_words(prompt: str, checkpoint: Path = DEMO_CHECKPOINT) -> list[str]:
    """The words of a prompt that are in no caption of its training, each once: its tokenizer spells them in bytes.

    An empty list where the tokenizer cannot be read: what loads it afterwards says why.
    """
    from tokenizers import Tokenizer

    prompt = _ESCAPE.sub(lambda found: " " * len(found.group()), prompt)
    try:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer" / "tokenizer.json"))
    except Exception:  # tokenizers raises no other
        return []
    spans = [span for span in tokenizer.encode(prompt, add_special_tokens=False).offsets if span[0] < span[1]]
    inside = {start for start, _ in spans}
    found = [match for match in _WORD.finditer(prompt) if not inside.isdisjoint(range(match.start() + 1, match.end()))]
    return list(dict.fromkeys(match.group() for match in found))
