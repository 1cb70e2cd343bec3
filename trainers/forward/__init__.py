"""What changes the learner's forward pass."""
