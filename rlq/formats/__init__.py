"""Codes and scales as data: element formats, tensor schemes, model schemes, and which modules they name."""
