"""Models of what a run costs."""
