"""How right ``specdec plan`` is: times of described machines, regret, published cases."""
