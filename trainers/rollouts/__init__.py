"""From the samplers to TRL: the generation seam."""
