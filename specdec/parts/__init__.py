"""Classes named by a configuration: import, validation and construction."""
