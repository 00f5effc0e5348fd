"""ComfyUI core around the pack: loading, fusing, sampling and comparing its MODEL objects."""
