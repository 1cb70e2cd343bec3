"""Settings of the samplers; parsed by TrlParser beside TRL's own configuration, hence the `sampler_` prefixes."""

from dataclasses import dataclass, field

from rlq.errors import ConfigError
from rlq.formats.modules import parse_per_layer
from rlq.formats.schemes import Scheme
from rlq.recipes.base import build

from .transport import TRANSPORTS, Transport

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class EngineOptions:
    """What one vLLM engine needs besides the model's configuration and the scheme."""

    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    max_num_seqs: int = 128
    """Completions decoded together."""
    kv_cache_bytes: int = 64 << 20
    """Size of the KV cache in bytes."""
    arithmetic: str = "auto"
    """`emulated` (rlq's plugin, any device), `kernel` (vLLM's own) or `auto`: a kernel where vLLM has one."""
    dtype: str = "float32"
    """Compute dtype of everything that the scheme leaves alone."""
    enforce_eager: bool = True
    """Skip CUDA graphs; always on a CPU."""
    tensor_parallel: int = 1
    """Processes, one GPU each, that share the layers."""


@dataclass(frozen=True)
class PoolOptions:
    """Size and patience of a pool."""

    num_samplers: int = 2
    """Actors."""
    num_cpus: float = 1
    """CPUs per actor; also its thread count."""
    num_gpus: float = 0
    """GPUs per actor."""
    placement: str = "PACK"
    """How actors are spread over nodes; a placement strategy of Ray."""
    max_restarts: int = 3
    """Actors replaced over the pool's life before it gives up; those of a lost node do not count."""
    startup_timeout_s: float = 300.0
    """Seconds for all actors to load."""
    whole_every: int = 1
    """Versions per whole snapshot; those in between travel as deltas."""
    call_timeout_s: float = 1800.0
    """Seconds without any answer after which busy actors count as dead."""


@dataclass
class SamplerConfig:
    """Who samples, in which precision, on how many actors."""

    sampler_scheme: str = field(default="fp8", metadata={"help": "Model scheme of the samplers, such as fp8 or bf16."})
    sampler_ignore: list[str] | None = field(
        default=None,
        metadata={"help": "Modules kept in bf16 (exact names or re: patterns); default: head, norms, gates."},
    )
    sampler_per_layer: list[str] | None = field(
        default=None,
        metadata={"help": "Other schemes for some modules, as PATTERN=SCHEME, such as re:.*down_proj=fp8."},
    )
    sampler_static_activations: bool = field(
        default=False,
        metadata={
            "help": "Activation scales that are calibrated for every version and not computed per input, for schemes "
            "whose inputs have one scale (fp8_tensor, nvfp4); what vLLM's NVFP4 kernels need."
        },
    )
    sampler_kv_cache: str | None = field(
        default=None,
        metadata={
            "help": "Round keys and values as they enter the cache: fp8, int8 or int4 per token and head, or with one "
            "scale per layer that is calibrated for every version (fp8.tensor and so on)."
        },
    )
    sampler_recipe: list[str] | None = field(
        default=None,
        metadata={"help": "What is done to weights besides rounding, as NAME or NAME:OPTION=VALUE; see rlq.recipes."},
    )
    num_samplers: int = field(default=2, metadata={"help": "Ray actors, one vLLM engine each."})
    sampler_num_cpus: float = field(default=1, metadata={"help": "CPUs per actor, also its thread count."})
    sampler_num_gpus: float = field(default=0, metadata={"help": "GPUs per actor; 0 samples on the CPU."})
    sampler_tensor_parallel_size: int = field(
        default=1,
        metadata={"help": "GPUs, or on a CPU processes, that one engine spans; sampler_num_gpus counts them."},
    )
    sampler_max_model_len: int = field(default=128, metadata={"help": "Longest prompt plus completion, in tokens."})
    sampler_max_num_seqs: int = field(default=128, metadata={"help": "Completions that one engine decodes together."})
    sampler_kv_cache_mib: int = field(default=64, metadata={"help": "KV cache per engine in MiB."})
    sampler_arithmetic: str = field(
        default="auto",
        metadata={
            "help": "kernel (vLLM's own), emulated (exact values, any device), or auto: a kernel where the GPU has one "
            "and sampler_dtype has 16 bits."
        },
    )
    sampler_dtype: str = field(default="float32", metadata={"help": "Compute dtype outside the scheme."})
    sampler_enforce_eager: bool = field(default=True, metadata={"help": "No CUDA graphs."})
    sampler_whole_every: int = field(
        default=1,
        metadata={"help": "Send a whole snapshot every N versions and only changed codes in between; 1: always whole."},
    )
    sampler_transport: str = field(
        default="object_store",
        metadata={
            "help": "How versions reach the samplers: object_store, shared_memory (one host), directory, nccl (between "
            "GPUs) or ipc (on the learner's GPU)."
        },
    )
    sampler_transport_dir: str | None = field(
        default=None,
        metadata={"help": "Absolute folder that learner and samplers share; for sampler_transport: directory."},
    )
    sampler_transport_keep: int = field(
        default=0,
        metadata={"help": "Whole versions, with their deltas, that stay in sampler_transport_dir; 0 keeps all."},
    )
    sampler_placement: str = field(
        default="PACK",
        metadata={"help": "PACK actors on few nodes or SPREAD them; STRICT_PACK and STRICT_SPREAD insist."},
    )
    sampler_max_restarts: int = field(default=3, metadata={"help": "Actor restarts in one run before it stops."})
    sampler_startup_timeout_s: float = field(default=300.0, metadata={"help": "Seconds that actors get to load."})

    def __post_init__(self) -> None:
        self.scheme()  # names and patterns that cannot be are refused now
        if self.num_samplers < 1:
            raise ConfigError(f"num_samplers is {self.num_samplers}; use at least 1")
        if self.sampler_whole_every < 1:
            raise ConfigError(f"sampler_whole_every is {self.sampler_whole_every}; 1 sends every version whole")
        if self.sampler_tensor_parallel_size < 1 or (
            self.sampler_num_gpus and self.sampler_tensor_parallel_size not in (1, self.sampler_num_gpus)
        ):
            raise ConfigError(
                f"sampler_tensor_parallel_size is {self.sampler_tensor_parallel_size}, sampler_num_gpus "
                f"{self.sampler_num_gpus:g}; an engine needs one GPU per rank"
            )
        if self.sampler_transport not in TRANSPORTS:
            raise ConfigError(f"sampler_transport is {self.sampler_transport!r}; use one of {', '.join(TRANSPORTS)}")
        if self.sampler_transport_keep < 0:
            raise ConfigError(f"sampler_transport_keep is {self.sampler_transport_keep}; 0 keeps every version")
        TRANSPORTS[self.sampler_transport].check(self)
        if self.sampler_placement not in PLACEMENTS:
            raise ConfigError(f"sampler_placement is {self.sampler_placement!r}; use one of {', '.join(PLACEMENTS)}")
        if self.sampler_arithmetic not in ("auto", "emulated", "kernel"):
            raise ConfigError(f"sampler_arithmetic is {self.sampler_arithmetic!r}; use auto, emulated or kernel")
        if self.sampler_arithmetic == "kernel" and self.sampler_kv_cache is not None:
            raise ConfigError(
                f"a cache in {self.sampler_kv_cache} is emulated; leave sampler_kv_cache out or set "
                "sampler_arithmetic: emulated"
            )

    def scheme(self) -> Scheme:
        """The model scheme that the fields name."""
        recipe = self.sampler_recipe or ()
        build(recipe)  # refuses unknown names and options
        return Scheme.preset(
            self.sampler_scheme,
            ignore=self.sampler_ignore,
            per_layer=parse_per_layer(self.sampler_per_layer or (), "sampler_per_layer"),
            kv_cache=self.sampler_kv_cache,
            static=self.sampler_static_activations or None,
            recipe=recipe,
        )

    def engine(self) -> EngineOptions:
        """The part that an engine sees."""
        return EngineOptions(
            max_model_len=self.sampler_max_model_len,
            max_num_seqs=self.sampler_max_num_seqs,
            kv_cache_bytes=self.sampler_kv_cache_mib << 20,
            arithmetic=self.sampler_arithmetic,
            dtype=self.sampler_dtype,
            enforce_eager=self.sampler_enforce_eager,
            tensor_parallel=self.sampler_tensor_parallel_size,
        )

    def pool(self) -> PoolOptions:
        """The part that the pool sees."""
        return PoolOptions(
            num_samplers=self.num_samplers,
            num_cpus=self.sampler_num_cpus,
            num_gpus=self.sampler_num_gpus,
            placement=self.sampler_placement,
            max_restarts=self.sampler_max_restarts,
            startup_timeout_s=self.sampler_startup_timeout_s,
            whole_every=self.sampler_whole_every,
        )

    def transport(self, model_config: dict) -> Transport:
        """The transport that the fields name; `model_config` is the model's `config.json`."""
        return TRANSPORTS[self.sampler_transport].from_config(self, model_config)
