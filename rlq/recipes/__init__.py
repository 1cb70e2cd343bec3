"""Recipes that prepare a model for a scheme, and the statistics that they need."""
