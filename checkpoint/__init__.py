"""From a safetensors file to tensors under one naming: header, layout, dimensions, conversion."""
