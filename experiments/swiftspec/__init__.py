"""SwiftSpec held against its bars and its own formulas."""
