"""Prices and search: sharding rules, compute, communication and memory models, both ILPs, the search over degrees."""
