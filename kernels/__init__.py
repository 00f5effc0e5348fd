"""One fused chain a file: Triton kernel, launcher, plain PyTorch reference. Importing a chain imports Triton."""
