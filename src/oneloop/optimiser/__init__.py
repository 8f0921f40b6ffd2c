"""optimiser."""
