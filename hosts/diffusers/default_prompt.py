"""The prompt of the command line's demo: a caption in the form that Ideogram 4 was trained on."""

from __future__ import annotations

import json

# Keys and their order are checked by the model's own caption verifier; a bbox is ymin, xmin, ymax, xmax in 0..1000.
_CAPTION = {
    "high_level_description": "A travel poster of a lighthouse on a rocky coast at dusk, its name set above it.",
    "style_description": {
        "aesthetics": "calm, few flat shapes, mid-century travel poster",
        "lighting": "low sun from the left, long shadows",
        "medium": "screen print",
        "art_style": "flat illustration with a fine paper grain",
        "color_palette": ["#0F2A47", "#F2A65A", "#F6EBD8"],
    },
    "compositional_deconstruction": {
        "background": "a dark blue sea under an orange sky that fades to cream",
        "elements": [
            {
                "type": "obj",
                "bbox": [260, 400, 860, 600],
                "desc": "a white lighthouse with two red bands, its lamp lit",
                "color_palette": ["#F6EBD8", "#C8321F"],
            },
            {"type": "obj", "bbox": [780, 0, 1000, 1000], "desc": "black rocks, foam at their feet"},
            {
                "type": "text",
                "bbox": [60, 180, 180, 820],
                "text": "NORTH LIGHT",
                "desc": "wide sans-serif capitals in cream",
                "color_palette": ["#F6EBD8"],
            },
        ],
    },
}

DEFAULT_PROMPT = json.dumps(_CAPTION, ensure_ascii=False, separators=(",", ":"))
