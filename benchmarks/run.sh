#!/bin/sh
# make bench: what benchmarks/results/ holds, and the tables made of it. Needs an NVIDIA GPU.
#
#   benchmarks/run.sh              kernels and attention; if a ComfyUI is found, steps under both of its patchers and of
#                                  the row-wise weights, generations, the distances of `high`, and whole renders (their
#                                  random VAE needs diffusers in ComfyUI's Python). loading.json is not among it:
#                                  loading.py needs no GPU, and 25 GB of disk.
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
results="$root/benchmarks/results"
row_wise="comfyui_steps --weights fp8_row_wise --sizes 1024 --rounds 2 --generations --pieces attention"
if [ -n "$missing" ]; then
    echo "ComfyUI: NOT MEASURED, $missing"
    python=$PYTHON
fi
measure kernels
measure attention
if [ -z "$missing" ]; then
    # As main.py sets it before PyTorch is imported, for all but GPUs that are older than the kernels take.
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-backend:cudaMallocAsync}"
    measure comfyui_steps --rounds 2 --pieces attention "fast accumulation" "unproven chains"
    measure comfyui_steps --rounds 2 --patcher plain --generations
    measure $row_wise "row-wise fp8" --output "$results/comfyui_row_wise.json"
    measure $row_wise --row-wise-weights bf16 --output "$results/comfyui_row_wise_bf16.json"
    measure comfyui_distance
    measure comfyui_comparison
fi
measure table
