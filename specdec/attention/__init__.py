"""Tree attention and the key-value caches that it reads."""
