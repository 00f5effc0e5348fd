#!/bin/sh
# make bench: everything that benchmarks/results/ holds, and the tables made of it. Needs an NVIDIA GPU.
#
#   benchmarks/run.sh              kernels; if a ComfyUI is found, steps and generations under both of its patchers, the
#                                  distances of `high`, and whole renders (their random VAE needs diffusers in ComfyUI's
#                                  Python)
#   benchmarks/run.sh FOLDER ...   with real weights, a folder in the official layout: see headless_generations.py,
#                                  which is given the rest
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
package="$root/build"
if [ $# -gt 0 ]; then
    PYTHONPATH="$package" exec "$PYTHON" -m ideogram4_fusion.benchmarks.headless_generations "$@"
fi
if ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "bench: PyTorch finds no NVIDIA GPU to measure on" >&2
    exit 1
fi
if [ -z "${GIT_COMMIT:-}" ]; then
    # Said once: what the first script writes would make the tree of the next one another.
    GIT_COMMIT=$(git -C "$root" describe --always --dirty --abbrev=12 2>/dev/null || true)
    export GIT_COMMIT
fi
. "$root/hosts/comfyui/find.sh"
measure() {
    script=$1
    shift
    COMFYUI_PATH="$comfyui" PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}" \
        "$python" -m "ideogram4_fusion.benchmarks.$script" "$@"
}
if [ -n "$missing" ]; then
    echo "ComfyUI: NOT MEASURED, $missing"
    python=$PYTHON
    measure kernels
else
    measure kernels
    measure comfyui_steps --patcher dynamic --pieces attention "fast accumulation" "unproven chains"
    measure comfyui_steps --patcher plain --generations
    measure comfyui_steps --weights fp8_row_wise --sizes 1024 --generations --pieces attention "row-wise fp8" \
        --output "$root/benchmarks/results/comfyui_row_wise.json"
    measure comfyui_distance
    measure comfyui_comparison
fi
measure table
