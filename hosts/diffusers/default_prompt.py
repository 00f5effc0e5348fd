"""The prompt of the command line's demo: a caption in the form that Ideogram 4 was trained on."""

from __future__ import annotations

import json

# Keys and their order are checked by the model's own caption verifier; a bbox is ymin, xmin, ymax, xmax in 0..1000.
_CAPTION = {
    "high_level_description": "A poster with a yellow star and the word HELLO.",
    "compositional_deconstruction": {
        "background": "a gradient from blue at the top to purple at the bottom",
        "elements": [
            {"type": "obj", "bbox": [140, 290, 520, 690], "desc": "a yellow star"},
            {"type": "text", "bbox": [700, 90, 910, 910], "text": "HELLO", "desc": "bold white capital letters"},
        ],
    },
}

DEFAULT_PROMPT = json.dumps(_CAPTION, ensure_ascii=False, separators=(",", ":"))
