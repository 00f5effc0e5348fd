#!/bin/sh
# Runs tests/comfyui with a real ComfyUI and its own Python, where one is found, and says so last where none is.
#
# ComfyUI: $COMFYUI_PATH, else the one whose custom_nodes this pack lies in, else comfy-cli's default workspace.
# Its Python: $COMFYUI_PYTHON, else .venv or venv in its folder, else $PYTHON.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd -P)
# The pack may be linked into custom_nodes: what counts is the way by which make was called.
for folder in "${COMFYUI_PATH:-}" "${PWD}/../.." "$root/../.." "${HOME:-/nonexistent}/comfy/ComfyUI"; do
    if [ -n "$folder" ] && [ -f "$folder/comfy/sd.py" ]; then
        comfyui=$(CDPATH='' cd -- "$folder" && pwd -P)
        break
    fi
done
if [ -z "${comfyui:-}" ]; then
    echo "ComfyUI suite: NOT RUN, no ComfyUI was found (set COMFYUI_PATH to one)"
    exit 0
fi
for python in "${COMFYUI_PYTHON:-}" "$comfyui/.venv/bin/python" "$comfyui/venv/bin/python" "${PYTHON:-python3}"; do
    [ -n "$python" ] && [ -x "$(command -v "$python" || true)" ] && break
done
if ! "$python" -c "import aiohttp, av, comfy_kitchen, torchsde" 2>/dev/null; then
    echo "ComfyUI suite: NOT RUN, $python lacks the packages of the ComfyUI at $comfyui (set COMFYUI_PYTHON)"
    exit 0
fi

# What the suite needs besides ComfyUI goes into a folder of its own: the artist's environment stays as it is.
extras="$root/.cache/comfyui-tests"
if [ ! -f "$extras/.installed" ]; then
    "$python" -m pip install --quiet --target "$extras" --constraint "$root/constraints.txt" pytest playwright
    touch "$extras/.installed"
fi
cd "$root"
echo "ComfyUI suite: $comfyui with $python"
COMFYUI_PATH="$comfyui" PYTHONPATH="$extras${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m pytest -q -p no:cacheprovider tests/comfyui
