"""Shows a line of text on a node while its graph runs."""

from __future__ import annotations

from collections.abc import Callable

from server import PromptServer


def show_on(node_id: str | None) -> Callable[[str], None]:
    """A function that shows a line on the node of that id; it does nothing where no server runs."""

    def show(text: str) -> None:
        server = getattr(PromptServer, "instance", None)
        if server is not None and node_id is not None:
            server.send_progress_text(text, node_id)

    return show
