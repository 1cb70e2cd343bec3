"""What a run looks at besides training."""
