"""Records traces of a run: a timeline of all ranks and the growth of the token trees."""
