"""The four exceptions of rlq; each is also a standard-library error and survives pickling (Ray needs that)."""


class RlqError(Exception):
    """Root of every error that rlq raises on purpose; its message is one line and names the mend."""


class ConfigError(RlqError, ValueError):
    """A setting, or a combination of settings, that cannot give a correct run."""


class SnapshotError(RlqError, ValueError):
    """Weights that must not be served: missing, unexpected, misshapen, non-finite or damaged tensors."""


class SamplerError(RlqError, RuntimeError):
    """A sampler that died, serves another version, or returned something that is not a rollout."""
