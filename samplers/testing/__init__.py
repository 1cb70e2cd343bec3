"""Samplers for tests: a transformers reference, and one whose answers and faults are scripted."""
