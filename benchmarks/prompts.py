"""The two subjects that this model's fusions have been judged by before: a photograph and a sheet of type.

Captions in the form that the model was trained on; a bbox is ymin, xmin, ymax, xmax in 0..1000.
"""

from __future__ import annotations

import json
from typing import Any

_FOX: dict[str, Any] = {
    "high_level_description": "A close photograph of a red fox standing in fresh snow at the edge of a birch wood.",
    "style_description": {
        "aesthetics": "quiet, natural, sharp fur against a soft background",
        "lighting": "overcast winter morning, soft light from above",
        "medium": "photograph",
        "photo": "85 mm lens at f/2, shallow depth of field",
        "color_palette": ["#B5532A", "#F4F1EC", "#6B6F73"],
    },
    "compositional_deconstruction": {
        "background": "out-of-focus birch trunks and falling snow",
        "elements": [
            {"type": "obj", "bbox": [180, 280, 960, 760], "desc": "a red fox facing the camera, snow on its muzzle"},
            {"type": "obj", "bbox": [800, 0, 1000, 1000], "desc": "untouched snow with one line of paw prints"},
        ],
    },
}

_POSTER: dict[str, Any] = {
    "high_level_description": "A typographic concert poster: large words in two weights on a plain ground.",
    "style_description": {
        "aesthetics": "Swiss grid, generous margins, nothing but type and one rule",
        "lighting": "none, flat print",
        "medium": "offset print",
        "art_style": "international typographic style",
        "color_palette": ["#E63B2E", "#FFFFFF", "#111111"],
    },
    "compositional_deconstruction": {
        "background": "a plain warm red",
        "elements": [
            {
                "type": "text",
                "bbox": [80, 80, 330, 920],
                "text": "NIGHT MUSIC",
                "desc": "heavy white grotesque capitals",
            },
            {"type": "obj", "bbox": [350, 80, 360, 920], "desc": "a thin black rule"},
            {"type": "text", "bbox": [400, 80, 520, 700], "text": "Four quartets", "desc": "light white grotesque"},
            {
                "type": "text",
                "bbox": [860, 80, 920, 600],
                "text": "14 May, 8 pm, Town Hall",
                "desc": "small black type",
            },
        ],
    },
}

PROMPTS = {name: json.dumps(c, separators=(",", ":")) for name, c in (("fox", _FOX), ("poster", _POSTER))}
