"""The bridge's metrics, as sums that can be added over micro-batches and ranks."""
