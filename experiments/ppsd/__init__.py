"""PPSD's tables and figures: its equations on its own figures, and runs of the presets."""
