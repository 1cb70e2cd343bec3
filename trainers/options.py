"""Settings of the learner: TRL's GRPOConfig with the defaults and refusals that quantized rollouts need."""

from dataclasses import dataclass, field

from rlq.errors import ConfigError

from .compat import GRPOConfig

# Settings of GRPOConfig that bias the ratio between learner and sampler or bypass the samplers, the only value that
# rlq accepts for each, and why.
REQUIRED: tuple[tuple[str, tuple, str], ...] = (
    ("top_p", (1.0,), "the sampler would renormalize over the kept tokens and the learner would not"),
    ("top_k", (0, None), "the sampler would renormalize over the kept tokens and the learner would not"),
    ("min_p", (None, 0.0), "the sampler would renormalize over the kept tokens and the learner would not"),
    ("repetition_penalty", (1.0,), "the learner scores tokens without the penalty"),
    ("generation_kwargs", (None, {}), "it could change what the sampler's log-probs mean"),
    ("use_vllm", (False,), "rlq brings its own samplers; configure them with sampler_* settings"),
    ("use_transformers_continuous_batching", (False,), "rlq brings its own samplers"),
    (
        "vllm_importance_sampling_correction",
        (True,),
        "quantized rollouts need the correction; use bridge_mode=none to study its absence",
    ),
)


@dataclass
class QuantGRPOConfig(GRPOConfig):
    """GRPOConfig for rollouts from quantized samplers."""

    logging_steps: float = field(default=1, metadata={"help": "Log every N steps."})
    report_to: None | str | list[str] = field(  # noqa: RUF036  (as TrainingArguments has it, which the parser needs)
        default="wandb", metadata={"help": "Trackers; wandb runs offline without a key."}
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate", metadata={"help": "Shape of TRL's own ratio, which rlq replaces by the bridge's."}
    )
    max_nonfinite_frac: float = field(
        default=0.01, metadata={"help": "Stop when more than this share of a batch's tokens has no finite log-prob."}
    )
    async_steps: int = field(
        default=0,
        metadata={"help": "Generation batches that are sampled ahead while the learner trains; 0 is on-policy."},
    )
    async_in_flight: str = field(
        default="finish",
        metadata={
            "help": "Completions that are being sampled ahead when a new version is ready: finish keeps their version, "
            "abort samples every prompt that is not complete again, by the new one."
        },
    )
    canary_prompts: int = field(
        default=2,
        metadata={
            "help": "Prompts that every sampler scores after an install, compared with a dequantized copy of the "
            "learner (fp32, on the CPU); 0 keeps no copy."
        },
    )
    canary_tolerance: float = field(
        default=0.05,
        metadata={
            "help": "Mean difference in nats per token, beyond what rounding explains, above which a "
            "sampler is installed again."
        },
    )
    calibration_prompts: int = field(
        default=32,
        metadata={"help": "Prompts on which static activation scales are calibrated, for every version."},
    )
    compact_buckets: int = field(
        default=8,
        metadata={
            "help": "Length groups per forward pass: each is computed without its padding, and a group's prompt once; "
            "0 computes what TRL computes."
        },
    )

    def __post_init__(self) -> None:
        for name, allowed, reason in REQUIRED:
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} cannot be used with rlq: {reason}; set it to {allowed[0]!r}")
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature} gives no ratio; use a value above 0")
        if self.temperature > 2:
            raise ConfigError(f"temperature={self.temperature} is more than vLLM samples at; use at most 2")
        if self.async_steps < 0:
            raise ConfigError(f"async_steps={self.async_steps} is negative; 0 waits for every batch")
        if self.async_in_flight not in ("finish", "abort"):
            raise ConfigError(f"async_in_flight is {self.async_in_flight!r}; use finish or abort")
        if self.canary_prompts < 0 or not self.canary_tolerance > 0:
            raise ConfigError(
                f"canary_prompts={self.canary_prompts} and canary_tolerance={self.canary_tolerance} cannot be used; "
                "take a count from 0 and a tolerance above 0"
            )
        if self.calibration_prompts < 1:
            raise ConfigError(f"calibration_prompts={self.calibration_prompts} calibrates nothing; use at least 1")
        if self.compact_buckets < 0:
            raise ConfigError(f"compact_buckets={self.compact_buckets} is negative; use 0 to compute the padding too")
        if self.max_completion_length is None:
            raise ConfigError("max_completion_length is None; the samplers need a limit in tokens, such as 512")
        super().__post_init__()


@dataclass(frozen=True)
class RunConfig:
    """What is trained on what."""

    model_name_or_path: str = field(metadata={"help": "Local checkpoint (relative to the repository too) or hub name."})
    dataset_name: str = field(
        default="sort_digits",
        metadata={"help": "sort_digits, a local file or folder, or a hub name; needs a prompt column."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a loaded dataset."})
    dataset_rows: int = field(default=4096, metadata={"help": "Rows that a generated dataset gets."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={"help": "exact_match, or dotted paths of functions in TRL's reward convention."},
    )
    learner_num_threads: int = field(default=0, metadata={"help": "CPU threads of the learner; 0 keeps torch's own."})
    learner_num_workers: int = field(
        default=1, metadata={"help": "Learner ranks; more than 1 run under Ray Train with accelerate."}
    )
    learner_cpus_per_worker: float = field(default=1, metadata={"help": "CPUs per learner rank under Ray Train."})
    learner_gpus_per_worker: float = field(default=0, metadata={"help": "GPUs per learner rank under Ray Train."})
