"""A workflow as the graph editor saves it -> the prompt that the editor queues for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

# Nodes that live in the editor only.
_VIRTUAL = frozenset({"Note", "MarkdownNote"})
_NEVER, _BYPASS = 2, 4  # LGraphEventMode

# What the editor makes a widget for; IMAGECOMPARE is core's slider, saved without a value.
_WIDGETS = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "IMAGECOMPARE"})
_VALUELESS: Json = {"IMAGECOMPARE": ["", ""]}

# Choices, comments and escapes, which the editor resolves in a widget with dynamicPrompts.
_DYNAMIC = ("{", "}", "//", "/*", "\\")


def to_prompt(workflow: Json, object_info: Json) -> Json:
    """The `output` of the editor's graphToPrompt.

    Args:
        workflow: schema version 0.4, without subgraphs and reroutes.
        object_info: what the server's /object_info answers, for the node types of the workflow at least.

    Raises:
        ValueError: the editor would change the text of a widget, or the graph needs a rule that is not written here.
    """
    origins = {link[0]: (str(link[1]), link[2]) for link in workflow["links"]}
    nodes = {str(node["id"]): node for node in workflow["nodes"] if _queued(node)}
    prompt: Json = {}
    for name, node in nodes.items():
        info = object_info[node["type"]]
        linked = {slot["name"]: origins[slot["link"]] for slot in node["inputs"] if slot.get("link") is not None}
        inputs = {
            widget: _wrapped(value) for widget, value in widget_values(node, info, skip=frozenset(linked)).items()
        }
        inputs.update({slot: list(origin) for slot, origin in linked.items() if origin[0] in nodes})
        title = node.get("title") or info["display_name"] or node["type"]
        prompt[name] = {"inputs": inputs, "class_type": node["type"], "_meta": {"title": title}}
    return prompt


def widget_values(node: Json, info: Json, skip: frozenset[str] = frozenset()) -> Json:
    """The values of a node's widgets by name, but for those in `skip`, in which a link replaces the value."""
    saved = list(node.get("widgets_values") or [])
    values: Json = {}
    for name, kind, spec in widget_specs(info):
        if kind not in _VALUELESS and not saved:
            raise ValueError(f"{node['type']}: no value is saved for {name}")
        value = _VALUELESS[kind] if kind in _VALUELESS else saved.pop(0)
        if spec.get("control_after_generate"):
            saved.pop(0)  # fixed, increment, decrement or randomize: the editor's own
        if name in skip:
            continue
        if spec.get("dynamicPrompts") and any(mark in value for mark in _DYNAMIC):
            raise ValueError(f"{node['type']}: the editor reads {name} as a dynamic prompt and changes it")
        values[name] = value
    if saved:
        raise ValueError(f"{node['type']}: {saved} belongs to no widget")
    return values


def widget_specs(info: Json) -> Iterator[tuple[str, str, Json]]:
    """Name, type and options of each widget that the editor makes for a node type, in the order of saved values."""
    for group in ("required", "optional"):
        for name, declared in info["input"].get(group, {}).items():
            spec = declared[1] if len(declared) > 1 else {}
            kind = declared[0]
            if isinstance(kind, list):  # how nodes of the first API declare a combo
                kind, spec = "COMBO", {**spec, "options": kind}
            if kind in _WIDGETS and not spec.get("forceInput"):
                yield name, kind, spec


def widget_problems(workflow: Json, object_info: Json) -> list[str]:
    """Every widget value that its node type does not offer: another option, out of range, or of another type."""
    return [
        f"{node['type']}.{name}: {value!r}"
        for node in workflow["nodes"]
        if _queued(node)
        for (name, kind, spec), value in _widgets_with_values(node, object_info[node["type"]])
        if not _allowed(kind, spec, value)
    ]


def _widgets_with_values(node: Json, info: Json) -> Iterator[tuple[tuple[str, str, Json], Any]]:
    linked = frozenset(slot["name"] for slot in node["inputs"] if slot.get("link") is not None)
    values = widget_values(node, info, skip=linked)
    return ((widget, values[widget[0]]) for widget in widget_specs(info) if widget[0] in values)


def _allowed(kind: str, spec: Json, value: Any) -> bool:
    if kind == "COMBO":
        return value in spec["options"]
    if kind in ("INT", "FLOAT"):
        if kind == "INT" and (type(value) is not int or (value - spec.get("min", 0)) % spec.get("step", 1)):
            return False
        return spec.get("min", value) <= value <= spec.get("max", value)
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}.get(kind, object))


def _queued(node: Json) -> bool:
    if node["mode"] == _BYPASS:
        raise ValueError(f"node {node['id']} is bypassed")
    return node["type"] not in _VIRTUAL and node["mode"] != _NEVER


def _wrapped(value: Any) -> Any:
    # A bare list in a prompt is a link.
    return {"__value__": value} if isinstance(value, list) else value
