"""Tables, figures and speeds of pipelined strategies, and the papers' formulas for them."""
