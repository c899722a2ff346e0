"""How a class that a configuration names is found, checked and constructed."""
