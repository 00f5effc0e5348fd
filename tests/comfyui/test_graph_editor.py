"""The shipped workflows in ComfyUI's own graph editor: the real server, the real frontend, headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ideogram4_fusion.tests.comfyui.graph import Json, to_prompt, widget_problems
from ideogram4_fusion.tests.comfyui.layout import overlaps
from ideogram4_fusion.tests.comfyui.server_process import serve, write_base
from ideogram4_fusion.tests.comfyui.workflow_files import WORKFLOWS, read_workflow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is missing")

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium to open the graph editor in", allow_module_level=True)

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
READY = "() => window.app?.vueAppReady && window.LiteGraph?.registered_node_types.Ideogram4Fusion_CompareQuality"
MISSING = "() => app.graph.nodes.map(n => n.type).filter(type => !(type in LiteGraph.registered_node_types))"
DANGLING = """() => [...app.graph.links.values()].filter(link =>
    !app.graph.getNodeById(link.origin_id)?.outputs[link.origin_slot]?.links.includes(link.id)
    || app.graph.getNodeById(link.target_id)?.inputs[link.target_slot]?.link !== link.id).map(link => link.id)"""
PROMPT = "async () => (await app.graphToPrompt()).output"
LINKS = "() => app.graph.links.size"
# Text that a node shows while it runs is a widget that the editor adds to it.
SHOWN = """title => app.graph.nodes.find(node => node.title === title).widgets
    .map(widget => widget.value).filter(value => typeof value === 'string')"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    base = tmp_path_factory.mktemp("comfyui")
    write_base(base)
    with (
        serve(Path(os.environ["COMFYUI_PATH"]), base) as address,
        playwright.sync_playwright() as driver,
        driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser,
    ):
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.goto(address)
        page.wait_for_function(READY, timeout=60_000)
        yield page


@pytest.fixture(scope="module")
def object_info(page: Page) -> Json:
    info: Json = page.evaluate("async () => (await fetch('/object_info')).json()")
    return info


def open_workflow(page: Page, workflow: Json, vue: bool = False) -> None:
    page.evaluate("vue => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', vue)", vue)
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)


@pytest.mark.parametrize("vue", [False, True], ids=["Nodes 1.0", "Nodes 2.0"])
@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_editor_opens_it_as_it_was_saved(
    name: str, vue: bool, page: Page, object_info: Json, tmp_path: Path
) -> None:
    workflow = read_workflow(name)
    open_workflow(page, workflow, vue)
    assert page.evaluate(MISSING) == []
    assert page.evaluate(DANGLING) == [] and page.evaluate(LINKS) == len(workflow["links"])
    assert page.evaluate(PROMPT) == to_prompt(workflow, object_info)
    opened = page.evaluate("() => app.graph.serialize()")
    assert widget_problems(opened, object_info) == []
    assert overlaps(opened) == []
    shots = Path(os.environ.get("COMFYUI_TEST_SCREENSHOTS", tmp_path))
    page.keyboard.press(".")  # fits the graph into the window
    page.wait_for_timeout(500)
    page.screenshot(path=shots / f"{name}{'_nodes2' if vue else ''}.png")


def test_a_muted_node_is_left_out_as_the_editor_leaves_it_out(page: Page, object_info: Json) -> None:
    """The converter of these tests against the editor, where the shipped workflows do not try it."""
    workflow = read_workflow("ideogram4_instant8")
    (decode,) = (node for node in workflow["nodes"] if node["type"] == "VAEDecode")
    decode["mode"] = 2
    open_workflow(page, workflow)
    queued = page.evaluate(PROMPT)
    assert str(decode["id"]) not in queued and queued == to_prompt(workflow, object_info)


def test_the_editor_offers_them_as_templates(page: Page) -> None:
    offered = page.evaluate("async () => (await fetch('/api/workflow_templates')).json()")
    assert sorted(offered["ComfyUI-Ideogram4-Fusion"]) == WORKFLOWS


def test_it_runs_at_the_press_of_a_button(page: Page) -> None:
    open_workflow(page, read_workflow("ideogram4_instant8"))
    done = """() => new Promise((resolve, reject) => {
        app.api.addEventListener('execution_success', () => resolve())
        app.api.addEventListener('execution_error', event => reject(event.detail.exception_message))
    })"""
    page.evaluate(f"() => {{ window.finished = ({done})() }}")
    page.get_by_test_id("queue-button").click()
    page.evaluate("() => window.finished")
    status = "stock: the model computes in float32 here, the kernels in bfloat16"
    assert status in page.evaluate(SHOWN, "Fusion status")
    assert status in page.evaluate(SHOWN, "Ideogram 4 Fusion Quality")
