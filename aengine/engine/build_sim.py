"""An engine's parts on the simulated device.

Owns: its pages and its executor.
Does not know: weights, torch.
Invariants: the model's configuration is read for its vocabulary and context only.
"""

from __future__ import annotations

import asyncio

from aengine.config import EngineConfig
from aengine.engine.ledger import Ledger, Made, served_names
from aengine.engine.sizing import free_bytes, size_pool
from aengine.errors import ConfigError
from aengine.memory import Full, attention_group
from aengine.models.facts import load_config
from aengine.models.store import ModelFiles
from aengine.runner.modelled import ModelledExecutor
from aengine.runner.protocol import Runner
from aengine.runner.sim import SimExecutor, SimGroup, SimProfile
from aengine.runner.sim_profiles import PROFILES
from aengine.runner.step import StreamRunner
from aengine.runner.stream import ThreadStream


def make_sim(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> Made:
    facts = load_config(files)
    group = attention_group("full", Full(), 1, kv_heads=1, head_dim=4, tokens_per_page=config.cache.page_tokens)
    pages, context = size_pool(
        [group],
        config.cache,
        config.scheduler,
        model_context=facts.max_positions,
        max_model_len=config.model.max_model_len,
        free=free_bytes(),
    )
    ledger.sizes.append(("KV pages (simulated)", pages.arena_bytes))
    slots, vocab, name = config.scheduler.max_num_seqs, facts.vocab_size, config.device.sim_profile
    profile = PROFILES.get(name or "")
    if name is not None and profile is None:
        raise ConfigError(f"sim_profile is {name!r}, not one of {', '.join(PROFILES)}", param="sim_profile")

    def make_runner(loop: asyncio.AbstractEventLoop) -> Runner:
        if profile is not None:
            slower = profile.slower(config.device.sim_scale)
            return StreamRunner(ThreadStream(), ModelledExecutor(slower, max_seqs=slots, vocab=vocab), loop)
        executor = SimExecutor(
            [SimGroup(pages.capacity[0] + pages.groups[0].slots, config.cache.page_tokens)],
            max_seqs=slots,
            max_tokens=context,
            vocab=vocab,
            profile=SimProfile(base_s=config.device.sim_step_s),
        )
        return StreamRunner(ThreadStream(), executor, loop)

    return Made(served_names(config, files), pages, context, facts.vocab_size, "sim", make_runner)
