"""Which modules of a model can be fused, the proof that they may be, mounting and unmounting."""
