"""Tree attention for transformers' models: key/value caches and implementations of attention."""
