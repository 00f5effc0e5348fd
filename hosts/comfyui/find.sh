# Sourced with $root, this pack's folder: sets $comfyui and $python, or the reason why not in $missing.
#
# ComfyUI: $COMFYUI_PATH, else the one whose custom_nodes this pack lies in, else comfy-cli's default workspace.
# Its Python: $COMFYUI_PYTHON, else .venv or venv in its folder, else $PYTHON.
comfyui=
missing=
# The pack may be linked into custom_nodes: what counts is the way by which make was called.
for folder in "${COMFYUI_PATH:-}" "${PWD}/../.." "$root/../.." "${HOME:-/nonexistent}/comfy/ComfyUI"; do
    if [ -n "$folder" ] && [ -f "$folder/comfy/sd.py" ]; then
        comfyui=$(CDPATH='' cd -- "$folder" && pwd -P)
        break
    fi
done
if [ -z "$comfyui" ]; then
    missing="no ComfyUI was found (set COMFYUI_PATH to one)"
else
    for python in "${COMFYUI_PYTHON:-}" "$comfyui/.venv/bin/python" "$comfyui/venv/bin/python" "${PYTHON:-python3}"; do
        [ -n "$python" ] && [ -x "$(command -v "$python" || true)" ] && break
    done
    if ! "$python" -c "import aiohttp, av, comfy_kitchen, torchsde" 2>/dev/null; then
        missing="$python lacks the packages of the ComfyUI at $comfyui (set COMFYUI_PYTHON)"
    fi
fi
