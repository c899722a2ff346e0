class Progress:
    """Receives reports on the progress of a job; this class ignores them."""

    def phase(self, label: str, total: int | None = None) -> None:
        """Ends the current phase and starts one of ``total`` items of work (None if unknown)."""

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Reports that ``count`` more items are done; ``detail`` is shown beside their number."""

    def note(self, text: str) -> None:
        """Reports a line or a table for the user."""
