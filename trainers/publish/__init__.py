"""From the learner's weights to the samplers."""
