#!/bin/sh
# Runs tests/comfyui with a real ComfyUI and its own Python, where one is found, and says so last where none is.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd -P)
. "$root/hosts/comfyui/find.sh"
if [ -n "$missing" ]; then
    echo "ComfyUI suite: NOT RUN, $missing"
    exit 0
fi

# What the suite needs besides ComfyUI goes into a folder of its own: the artist's environment stays as it is.
extras="$root/.cache/comfyui-tests"
if [ ! -f "$extras/.installed-with-diffusers" ]; then
    "$python" -m pip install --quiet --target "$extras" --constraint "$root/constraints.txt" pytest playwright
    # Without what it asks for, most of which ComfyUI has: another torch or transformers would hide ComfyUI's.
    "$python" -m pip install --quiet --target "$extras" --constraint "$root/constraints.txt" --no-deps \
        diffusers importlib-metadata zipp
    touch "$extras/.installed-with-diffusers"
fi
cd "$root"
echo "ComfyUI suite: $comfyui with $python"
COMFYUI_PATH="$comfyui" PYTHONPATH="$extras${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m pytest -q -p no:cacheprovider tests/comfyui
