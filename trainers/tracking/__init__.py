"""What a run shows: metrics.jsonl, a progress line, wandb, curves and a closing table."""
