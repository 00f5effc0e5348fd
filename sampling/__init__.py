"""Sampling presets and their sigmas."""
