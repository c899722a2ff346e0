"""Recipes that train the bundled model family; see specdec.train.cli.run for the entry point."""
