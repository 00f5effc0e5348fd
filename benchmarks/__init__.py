"""Scripts that measure, and results/ with what they wrote."""
