"""What a sampler computes, with torch: the emulated linear, a whole model, the canary's probe."""
