"""A model's weights: canonical names, checkpoint files, quantizing all of them, compressed-tensors' layout."""
