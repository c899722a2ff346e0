"""Tree attention: key/value caches, implementations of attention, and their use by transformers."""
