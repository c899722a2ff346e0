"""SwiftSpec's tables and figures, compared with the paper and with its formulas."""
