class Progress:
    """Receives reports on the progress of a job; this class ignores them."""

    def phase(self, label: str, total: int | None = None) -> None:
        """Starts a phase of ``total`` units (None if unknown) and ends the previous one."""

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Counts ``count`` more units; ``detail`` is shown beside them."""

    def note(self, text: str) -> None:
        """Prints a line or a table."""
