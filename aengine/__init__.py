"""aengine: an asyncio inference engine for language models.

Owns: the public names. Does not know: anything else; the heavy parts load on first use.
Invariants: importing this package imports neither torch nor aiohttp.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncEngine": "aengine.engine.async_engine",
    "AsyncClient": "aengine.client.async_client",
    "LLM": "aengine.engine.llm",
    "RequestStream": "aengine.engine.stream",
    "describe_kernels": "aengine.engine.build_cpu",
    "describe_pages": "aengine.engine.build",
    "EngineConfig": "aengine.config",
    "ModelConfigArgs": "aengine.config",
    "SchedulerConfig": "aengine.config",
    "CacheConfig": "aengine.config",
    "DeviceConfig": "aengine.config",
    "ServerConfig": "aengine.config",
    "SamplingParams": "aengine.types",
    "Grammar": "aengine.types",
    "RequestOutput": "aengine.types",
    "CompletionOutput": "aengine.types",
    "OutputDelta": "aengine.types",
    "TokenLogprob": "aengine.types",
    "FinishReason": "aengine.types",
    "AengineError": "aengine.errors",
    "InvalidRequest": "aengine.errors",
    "InvalidGrammar": "aengine.errors",
    "GrammarTooComplex": "aengine.errors",
    "ContextLengthExceeded": "aengine.errors",
    "QueueFull": "aengine.errors",
    "EngineDead": "aengine.errors",
    "StepFailed": "aengine.errors",
    "ServerUnreachable": "aengine.errors",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from aengine.client.async_client import AsyncClient as AsyncClient
    from aengine.config import CacheConfig as CacheConfig
    from aengine.config import DeviceConfig as DeviceConfig
    from aengine.config import EngineConfig as EngineConfig
    from aengine.config import ModelConfigArgs as ModelConfigArgs
    from aengine.config import SchedulerConfig as SchedulerConfig
    from aengine.config import ServerConfig as ServerConfig
    from aengine.engine.async_engine import AsyncEngine as AsyncEngine
    from aengine.engine.build import describe_pages as describe_pages
    from aengine.engine.build_cpu import describe_kernels as describe_kernels
    from aengine.engine.llm import LLM as LLM
    from aengine.engine.stream import RequestStream as RequestStream
    from aengine.errors import AengineError as AengineError
    from aengine.errors import ContextLengthExceeded as ContextLengthExceeded
    from aengine.errors import EngineDead as EngineDead
    from aengine.errors import GrammarTooComplex as GrammarTooComplex
    from aengine.errors import InvalidGrammar as InvalidGrammar
    from aengine.errors import InvalidRequest as InvalidRequest
    from aengine.errors import QueueFull as QueueFull
    from aengine.errors import ServerUnreachable as ServerUnreachable
    from aengine.errors import StepFailed as StepFailed
    from aengine.types import CompletionOutput as CompletionOutput
    from aengine.types import FinishReason as FinishReason
    from aengine.types import Grammar as Grammar
    from aengine.types import OutputDelta as OutputDelta
    from aengine.types import RequestOutput as RequestOutput
    from aengine.types import SamplingParams as SamplingParams
    from aengine.types import TokenLogprob as TokenLogprob


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'aengine' has no attribute {name!r}")
    return getattr(import_module(module), name)
