"""The papers' tables and figures: stated values, runs, verdicts (``specdec reproduce``)."""
