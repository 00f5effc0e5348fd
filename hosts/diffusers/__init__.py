"""diffusers around the pack: a checkpoint folder, rendered and compared from the command line."""
