"""Which clients the matrix has: name, script, packages.

Owns: CLIENTS.
Does not know: how an environment is made or a script is run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """`packages`: as pip or npm takes them. `shown`: those whose versions the table names; all of them if empty.

    `kind`: "pip" and "npm" get an environment of their own, "plain" runs in this one. `servers`: how many it needs.
    """

    name: str
    about: str
    kind: str
    script: str
    packages: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    servers: int = 1


def _pip(name: str, about: str, script: str, *packages: str, shown: tuple[str, ...] = (), servers: int = 1) -> Client:
    return Client(name, about, "pip", script, packages, shown, servers)


def _npm(name: str, about: str, script: str, *packages: str) -> Client:
    return Client(name, about, "npm", script, packages)


CLIENTS = (
    Client("curl", "curl", "plain", "curl_cli"),
    _pip("openai-3", "openai-python 3.x", "openai_python", "openai>=3,<4", shown=("openai",)),
    _pip("openai-2", "openai-python 2.x", "openai_python", "openai>=2,<3", shown=("openai",)),
    _npm("openai-node", "openai-node", "openai_node", "openai", "zod"),
    _npm(
        "ai-compatible",
        "Vercel ai, @ai-sdk/openai-compatible",
        "ai_compatible",
        "ai",
        "@ai-sdk/openai-compatible",
        "zod",
    ),
    _npm("ai-openai", "Vercel ai, @ai-sdk/openai (Responses)", "ai_openai", "ai", "@ai-sdk/openai", "zod"),
    _pip("anthropic", "anthropic-python", "anthropic_python", "anthropic"),
    _npm("anthropic-node", "@anthropic-ai/sdk", "anthropic_node", "@anthropic-ai/sdk"),
    _pip(
        "langchain",
        "LangChain ChatOpenAI",
        "langchain_openai_chat",
        "langchain-openai",
        shown=("langchain-openai", "langchain-core", "openai"),
    ),
    _pip("instructor", "instructor", "instructor_client", "instructor", shown=("instructor", "openai")),
    _pip(
        "pydantic-ai",
        "pydantic-ai",
        "pydantic_ai_agent",
        "pydantic-ai-slim[openai]",
        shown=("pydantic-ai-slim", "openai"),
    ),
    _pip("litellm", "litellm", "litellm_completion", "litellm", shown=("litellm", "openai")),
    _pip("llm", "llm (command)", "llm_cli", "llm", shown=("llm", "openai")),
    _pip("lm-eval", "lm-eval", "lm_eval_run", "lm-eval[api]", shown=("lm_eval",)),
    _pip("vllm-bench", "vllm bench serve", "vllm_bench", "vllm[bench]", shown=("vllm",)),
    _pip(
        "gradio",
        "gradio load_chat in Chromium",
        "gradio_chat",
        "gradio",
        "openai",
        "aiohttp",
        shown=("gradio", "openai"),
    ),
    _pip(
        "vllm-router",
        "vllm-router before two servers",
        "vllm_router_two",
        "vllm-router",
        "openai",
        shown=("vllm-router",),
        servers=2,
    ),
)
