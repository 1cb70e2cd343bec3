"""What else the log ratio tells: breakdowns, shadow estimators, gap attribution, selection bias."""
