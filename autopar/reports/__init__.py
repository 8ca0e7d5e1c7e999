"""What a person reads: text tables of a plan, its price and its alternatives."""
