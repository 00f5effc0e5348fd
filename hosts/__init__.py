"""Where a model lives: ComfyUI or diffusers."""
