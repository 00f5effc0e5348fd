"""The real core in this process: its server, its nodes and the pack's, its validation and its executor."""

from __future__ import annotations

import asyncio
import copy
import functools
import uuid
from pathlib import Path
from typing import Any

import execution
import folder_paths
from aiohttp.test_utils import TestClient, TestServer
from ideogram4_fusion.tests.comfyui.graph import Json
from server import PromptServer

import nodes


class RecordingServer(PromptServer):
    """Keeps what the real server sends to the editor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.sent: list[tuple[Any, Any]] = []

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        self.sent.append((event, data))


class ExecutionFailed(Exception):
    """What the editor shows in its error dialog."""


class Core:
    """core with all its own nodes, and the pack's once it is loaded.

    Args:
        models: a models folder, searched before ComfyUI's own.
    """

    def __init__(self, models: Path) -> None:
        for folder in ("diffusion_models", "text_encoders", "vae"):
            folder_paths.add_model_folder_path(folder, str(models / folder), is_default=True)
        self._loop = asyncio.new_event_loop()
        self.server = RecordingServer(self._loop)
        self._loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        self.server.add_routes()

    def load_pack(self, path: Path) -> None:
        """Loads a custom node folder the way core does at its start. Raises ImportError if core gives up on it."""
        if not self._loop.run_until_complete(nodes.load_custom_node(str(path))):
            raise ImportError(f"ComfyUI cannot load {path}; its log says why")

    @functools.cached_property
    def object_info(self) -> Json:
        """What the server answers for the nodes that are loaded at the first use of this."""
        answer: Json = self._loop.run_until_complete(self._ask("/object_info"))
        return answer

    def close(self) -> None:
        self._loop.close()
        del PromptServer.instance

    def errors(self, prompt: Json) -> list[str]:
        """What core's validation says against a prompt, a line each; [] where the editor would queue it."""
        _, error, _, node_errors = self._validate(copy.deepcopy(prompt))
        found = [e for node in node_errors.values() for e in node["errors"]]
        if error is not None and not found:
            found = [error]
        return [f"{e['message']}: {e['details']}" for e in found]

    def run(self, prompt: Json) -> dict[str, Json]:
        """Executes a prompt and returns what its output nodes show, by node.

        Raises:
            ExecutionFailed: a node raised.
        """
        prompt = copy.deepcopy(prompt)
        valid, error, outputs, node_errors = self._validate(prompt)
        if not valid or node_errors:
            raise ExecutionFailed(str(error or node_errors))
        self.server.sent.clear()
        executor = execution.PromptExecutor(
            self.server, execution.CacheType.CLASSIC, {"lru": 0, "ram": 0, "ram_inactive": 0}
        )
        executor.execute(prompt, str(uuid.uuid4()), {}, outputs)
        for event, message in executor.status_messages:
            if event == "execution_error":
                raise ExecutionFailed(f"{message['node_type']}: {message['exception_message']}")
        return executor.history_result["outputs"]

    def shown_on(self, node: str) -> list[str]:
        """The lines that the last run showed on a node while it ran."""
        prefix = len(node.encode()).to_bytes(4, "big") + node.encode()
        return [
            data.removeprefix(prefix).decode()
            for _, data in self.server.sent
            if isinstance(data, bytes) and data.startswith(prefix)
        ]

    # Validation writes converted values back into the prompt, and the executor needs them.
    def _validate(self, prompt: Json) -> tuple[bool, Json | None, list[str], Json]:
        return self._loop.run_until_complete(execution.validate_prompt("test", prompt, None))

    async def _ask(self, path: str) -> Json:
        async with TestClient(TestServer(self.server.app)) as client:
            response = await client.get(path)
            return await response.json()
