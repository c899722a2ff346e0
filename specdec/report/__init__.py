"""Result files, tables, plots, HTML pages and provenance."""
