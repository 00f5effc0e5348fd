"""Where the nodes of a workflow lie."""

from __future__ import annotations

import itertools

from ideogram4_fusion.tests.comfyui.graph import Json

TITLE = 30  # pixels of a node's title, which lies above its position


def overlaps(workflow: Json) -> list[tuple[str, str]]:
    """The pairs of nodes, by type, that cover each other."""
    boxes = [(node["type"], _box(node)) for node in workflow["nodes"]]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if _meet(one, other)]


def groups_around(workflow: Json, node: Json) -> list[int]:
    """The left edges of the groups that a node lies in."""
    left, top, right, bottom = _box(node)
    frames = [(x, y, x + w, y + h) for x, y, w, h in (group["bounding"] for group in workflow["groups"])]
    return [f[0] for f in frames if f[0] <= left and f[1] <= top and right <= f[2] and bottom <= f[3]]


def _box(node: Json) -> tuple[float, float, float, float]:
    (x, y), (w, h) = node["pos"], node["size"]
    return x, y - TITLE, x + w, y + h


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
