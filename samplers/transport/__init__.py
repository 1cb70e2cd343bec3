"""How a published version gets from the learner to the samplers' processes."""
