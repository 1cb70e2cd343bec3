"""What a correction is, its rules and weights, and every peer's by name."""
