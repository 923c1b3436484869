"""The one frozen configuration tree.

Owns: every setting, its default, its help text and its check. The only reader of environment variables.
Does not know: how settings act, nor how flags and files are parsed (`aengine.cli.settings` derives them from here).
Invariants: `EngineConfig()` alone is a working configuration; a wrong value raises ConfigError naming it and its
limits; a leaf's name is unique in the whole tree, so that one name serves as flag, YAML key and variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from aengine.errors import ConfigError

T = TypeVar("T")
ENV_PREFIX = "AENGINE_"
HOME_VARIABLE = "AENGINE_HOME"


def home() -> Path:
    """Where downloaded models and caches live: $AENGINE_HOME, or ~/.cache/aengine. Not created here."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.cache/aengine").expanduser()


def usable_home() -> Path:
    """`home()`, created; raises ConfigError when it cannot be a folder that files can be written to."""
    folder = home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{HOME_VARIABLE} {folder} cannot be used: {error.strerror or error}") from error
    return folder


def environment() -> dict[str, str]:
    """All AENGINE_* variables except AENGINE_HOME: name without prefix, in lower case -> text."""
    return {
        name.removeprefix(ENV_PREFIX).lower(): text
        for name, text in sorted(os.environ.items())
        if name.startswith(ENV_PREFIX) and name != HOME_VARIABLE
    }


def _setting(default: T, text: str, *, rare: bool = False) -> T:
    """A leaf with its help text. Typed as its default, as `dataclasses.field` itself is. `rare`: few will set it."""
    made: T = field(default=default, metadata={"help": text, "rare": rare})
    return made


def _check(name: str, value: float | None, low: float, high: float, unit: str = "") -> None:
    """Raise ConfigError unless low <= value <= high; None (a fitted value) passes, NaN does not."""
    if value is not None and not low <= value <= high:
        of = f" {unit}" if unit else ""
        raise ConfigError(f"{name} is {value}{of}, not in [{low}, {high}]", param=name)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} is {value!r}, not one of {listed}", param=name)


def _check_filled(name: str, values: tuple[str, ...]) -> None:
    for value in values:
        if not value or value != value.strip():
            raise ConfigError(f"{name} holds {value!r}, which is empty or has outer spaces", param=name)


@dataclass(frozen=True, slots=True)
class ModelConfigArgs:
    """Which model, and how it is held."""

    model: str = _setting("smollm2-135m", "packaged name, folder in Hugging Face layout, .gguf file or hub id")
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "element type of activations and of weights held plain"
    )
    quantize: Literal["auto", "none", "int8", "int4"] = _setting(
        "auto", "integer weights: auto the file's own, unless dtype is given; none; or made at load"
    )
    max_model_len: int | None = _setting(None, "context length in tokens; unset: fitted to the model and memory")
    chat_template: str | None = _setting(None, "file with a Jinja chat template; unset: the model's own")
    served_model_name: tuple[str, ...] = _setting((), "names the HTTP API answers to; unset: the model's name")

    def __post_init__(self) -> None:
        _check_filled("model", (self.model,))
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _check_choice("quantize", self.quantize, ("auto", "none", "int8", "int4"))
        _check("max_model_len", self.max_model_len, 1, 2**27, "tokens")
        _check_filled("served_model_name", self.served_model_name)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How many requests and tokens share a step."""

    max_num_seqs: int = _setting(64, "rows that run at once (slots)")
    max_batched_tokens: int = _setting(512, "token budget of one step")
    max_waiting: int = _setting(1024, "size of the waiting room; beyond it a request is refused with 429")
    step_ms: float | None = _setting(
        None, "milliseconds a step may take while rows decode; 0: as long as it takes; unset: 100 on the CPU, else 0"
    )
    depth: int = _setting(1, "steps in flight while the next is planned: 0 synchronous, 1 overlapped, 2 experiment")
    speculate: int | None = _setting(
        None,
        "most draft tokens a row brings to a step, copied from where its text seems to repeat itself, kept as far as "
        "they are right; 0 or off: none; unset or auto: 12 with native CPU kernels, else none",
    )
    multi_step: int = _setting(
        1,
        "decode steps planned and launched at once, without overlap: K > 1 shows K tokens at a time; to compare with",
        rare=True,
    )

    def __post_init__(self) -> None:
        _check("max_num_seqs", self.max_num_seqs, 1, 65536, "rows")
        _check("max_batched_tokens", self.max_batched_tokens, 2, 2**20, "tokens")  # one to decode, one to prefill
        _check("max_waiting", self.max_waiting, 1, 2**20, "requests")
        _check("step_ms", self.step_ms, 0.0, 60_000.0, "ms")
        _check("depth", self.depth, 0, 2, "steps")
        _check("speculate", self.speculate, 0, 64, "tokens")
        _check("multi_step", self.multi_step, 1, 64, "steps")
        if self.speculate and self.multi_step > 1:
            raise ConfigError(
                f"speculate {self.speculate} and multi_step {self.multi_step} exclude each other: drafts are made from "
                "the last token, which steps planned at once do not wait for",
                param="speculate",
            )

    @property
    def steps_in_flight(self) -> int:
        """At most. Steps planned at once are not overlapped, so `depth` does not count then."""
        return self.multi_step if self.multi_step > 1 else self.depth + 1


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV pages and their reuse."""

    page_tokens: int = _setting(16, "tokens a KV page holds", rare=True)
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = _setting(
        "auto",
        "element type of KV pages; auto: dtype if given, else bfloat16; int8: a scale per token and head; fp8: e4m3, "
        "not for native CPU kernels",
    )
    kv_bytes: int | None = _setting(None, "bytes for KV pages (512MiB, 2GiB); unset: fitted to free memory")
    prefix_caching: bool = _setting(True, "reuse the KV of prompts that begin alike")

    def __post_init__(self) -> None:
        _check("page_tokens", self.page_tokens, 1, 1024, "tokens")
        _check_choice("kv_dtype", self.kv_dtype, ("auto", "float32", "bfloat16", "int8", "fp8"))
        _check("kv_bytes", self.kv_bytes, 1, 2**50, "bytes")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where steps run."""

    device: Literal["auto", "cpu", "cuda", "sim"] = _setting(
        "auto", "device; auto: cuda where there is any; sim is a delayed device for tests"
    )
    threads: int | None = _setting(None, "compute threads; unset: all cores")
    kernels: Literal["auto", "native", "reference"] = _setting("auto", "CPU kernels: compiled C, or plain torch")
    cpu_isa: Literal["auto", "avx512vnni", "avx512", "avx2vnni", "avx2", "portable"] = _setting(
        "auto", "instruction set of the native kernels; auto: the best the processor and the compiler have", rare=True
    )
    capture: bool = _setting(
        True,
        "replay steps as one call (native kernels) or as CUDA graphs, decode steps whole and others in pieces between "
        "attentions; off: one operation at a time",
        rare=True,
    )
    compile: bool = _setting(
        False,
        "torch.compile for all of a forward but attention (on the CPU instead of the native kernels, on CUDA instead "
        "of pieces)",
    )
    attention_backend: Literal["auto", "flashinfer", "triton", "reference"] = _setting(
        "auto", "kernels on CUDA; auto: FlashInfer's attention over Triton's other kernels, as far as installed"
    )
    sampling_backend: Literal["auto", "flashinfer"] = _setting(
        "auto",
        "who draws tokens on CUDA; auto: the engine's own kernels, by seed and position; flashinfer: its kernels for "
        "requests without a seed, whose tokens then depend on the batch",
        rare=True,
    )
    gpu_memory_percent: float = _setting(
        90.0, "share of the CUDA device's memory for weights, KV pages and activations"
    )
    sim_step_s: float = _setting(0.0, "seconds a step takes on the sim device", rare=True)
    sim_profile: str | None = _setting(
        None, "sim: take the modelled time of a device and model pair (h100-llama8b, 8xh100-llama70b)", rare=True
    )
    sim_scale: float = _setting(1.0, "sim: a device that takes so many times as long as sim_profile says", rare=True)

    def __post_init__(self) -> None:
        _check_choice("device", self.device, ("auto", "cpu", "cuda", "sim"))
        _check_choice("kernels", self.kernels, ("auto", "native", "reference"))
        _check_choice("cpu_isa", self.cpu_isa, ("auto", "avx512vnni", "avx512", "avx2vnni", "avx2", "portable"))
        if self.compile and self.kernels == "native":
            raise ConfigError(
                "compile and kernels native exclude each other: native kernels replay a captured step, which is "
                "faster; with kernels auto or reference, compile takes plain torch",
                param="compile",
            )
        _check("threads", self.threads, 1, 1024, "threads")
        _check("sim_step_s", self.sim_step_s, 0.0, 60.0, "s")
        _check("sim_scale", self.sim_scale, 0.001, 1000.0)
        _check_choice("attention_backend", self.attention_backend, ("auto", "flashinfer", "triton", "reference"))
        _check_choice("sampling_backend", self.sampling_backend, ("auto", "flashinfer"))
        _check("gpu_memory_percent", self.gpu_memory_percent, 1.0, 100.0, "%")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an engine needs; what a program that embeds one writes."""

    model: ModelConfigArgs = field(default_factory=ModelConfigArgs)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    max_logprobs: int = _setting(20, "most alternatives a request may ask for per token", rare=True)
    max_n: int = _setting(128, "most choices a request may ask for", rare=True)
    otlp_endpoint: str | None = _setting(
        None, "OpenTelemetry collector to send a trace of each request to (http://HOST:4318/v1/traces); unset: none"
    )

    def __post_init__(self) -> None:
        _check("max_logprobs", self.max_logprobs, 0, 1024)
        _check("max_n", self.max_n, 1, 1024)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server around an engine."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0: any free one")
    frontends: int | None = _setting(
        None, "processes for HTTP and text; 0: in the engine's process; unset or auto: 0 below 8 cores, else up to 4"
    )
    api_key: str | None = _setting(None, "key that clients must send as a bearer token; unset: none needed")
    cors_origins: tuple[str, ...] = _setting((), "origins besides localhost that browsers may call from")
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral", "qwen", "none"] = _setting(
        "auto", "how tool calls are read from the text; auto: as the chat template writes them; none: not at all"
    )
    reasoning_parser: Literal["auto", "think", "none"] = _setting(
        "auto", "how reasoning is split from the answer; auto: if the chat template knows marks of it"
    )
    client_chat_templates: bool = _setting(False, "let requests bring a chat template: a program that runs unchecked")
    max_body_bytes: int = _setting(8 * 2**20, "largest request body (for instance 8MiB)")
    max_upload_bytes: int = _setting(
        256 * 2**20, "bytes that all bodies being read may hold together (front-ends share them evenly)", rare=True
    )
    body_timeout_s: float = _setting(60.0, "seconds a request's body may take to arrive", rare=True)
    max_connections: int = _setting(
        16384,
        "open connections; beyond it the longest idle one is closed for a new one (front-ends share them, with slack)",
        rare=True,
    )
    idle_timeout_s: float = _setting(75.0, "seconds a connection may be open without a request's whole head", rare=True)
    stall_timeout_s: float = _setting(
        120.0, "seconds after which a client that takes no byte of its answer is cut", rare=True
    )
    shutdown_timeout_s: float = _setting(30.0, "seconds that open requests get to end after Ctrl-C")
    keepalive_s: float = _setting(15.0, "idle seconds after which a stream gets a keep-alive comment", rare=True)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least severity that is logged")

    def __post_init__(self) -> None:
        _check_filled("host", (self.host,))
        _check("port", self.port, 0, 65535)
        _check("frontends", self.frontends, 0, 64, "processes")
        if self.api_key is not None:
            _check_key(self.api_key)
        _check_filled("cors_origins", self.cors_origins)
        _check_choice("tool_parser", self.tool_parser, ("auto", "hermes", "llama3_json", "mistral", "qwen", "none"))
        _check_choice("reasoning_parser", self.reasoning_parser, ("auto", "think", "none"))
        _check("max_body_bytes", self.max_body_bytes, 1024, 2**40, "bytes")
        _check("max_upload_bytes", self.max_upload_bytes, 1024, 2**40, "bytes")
        _check("body_timeout_s", self.body_timeout_s, 0.1, 3600.0, "s")
        _check("max_connections", self.max_connections, 1, 2**20, "connections")
        _check("idle_timeout_s", self.idle_timeout_s, 0.1, 86_400.0, "s")
        _check("stall_timeout_s", self.stall_timeout_s, 0.1, 86_400.0, "s")
        _check("shutdown_timeout_s", self.shutdown_timeout_s, 0.0, 3600.0, "s")
        _check("keepalive_s", self.keepalive_s, 0.1, 3600.0, "s")
        _check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))


def _check_key(key: str) -> None:
    """A key that no header can carry would lock everybody out. The message must not show the key."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"api_key ({len(key)} characters) is empty or not printable ASCII", param="api_key")


@dataclass(frozen=True, slots=True)
class AengineConfig:
    """The root: what `aengine serve` is started with."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
