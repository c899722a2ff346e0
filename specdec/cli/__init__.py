"""The command line composes a configuration with Hydra, checks it and passes plain dicts on."""
