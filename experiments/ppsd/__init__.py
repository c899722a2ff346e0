"""PPSD's tables and figures: its laws on its own figures, and runs of the preset."""
