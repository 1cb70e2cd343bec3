"""One vLLM engine that serves published weights."""
