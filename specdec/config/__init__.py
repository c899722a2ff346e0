"""From a command line or a mapping of overrides to one validated configuration."""
