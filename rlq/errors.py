"""The four exceptions of rlq; each is also a standard-library error and survives pickling (Ray needs that)."""


class RlqError(Exception):
    """Root of every error that rlq raises on purpose; its message is one line that says what to do."""


class ConfigError(RlqError, ValueError):
    """A setting, or a combination of settings, that cannot give a correct run."""


class SnapshotError(RlqError, ValueError):
    """Weights that must not be served: missing, unexpected, wrongly shaped, non-finite or damaged tensors."""


class SamplerError(RlqError, RuntimeError):
    """A sampler that died, serves another version, or returned something that is not a rollout."""


def last_line(error: BaseException) -> str:
    """The last line of a foreign error's message, which says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
