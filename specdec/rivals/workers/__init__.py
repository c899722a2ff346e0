"""Programs that run in the Python of another runtime, and therefore import nothing of specdec."""
