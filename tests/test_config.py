"""The config tree: defaults, limits, the environment."""

import dataclasses
from pathlib import Path

import pytest

from aengine import config
from aengine.config import (
    AengineConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfigArgs,
    SchedulerConfig,
    ServerConfig,
)
from aengine.errors import ConfigError


def test_defaults_are_a_working_configuration():
    root = AengineConfig()
    assert root.engine == EngineConfig()
    assert root.engine.model.model == "smollm2-135m"
    assert root.engine.scheduler.depth == 1
    assert (root.server.host, root.server.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("make", "name", "value", "limit"),
    [
        (ServerConfig, "port", 70_000, "[0, 65535]"),
        (ServerConfig, "port", -1, "[0, 65535]"),
        (ServerConfig, "max_body_bytes", 10, "[1024, "),
        (ServerConfig, "shutdown_timeout_s", -0.5, "[0.0, 3600.0]"),
        (ServerConfig, "keepalive_s", 0.0, "[0.1, 3600.0]"),
        (ServerConfig, "keepalive_s", float("nan"), "[0.1, 3600.0]"),
        (ServerConfig, "log_level", "loud", "debug, info, warning, error"),
        (ServerConfig, "host", "", "empty"),
        (ServerConfig, "cors_origins", ("http://a", " "), "empty"),
        (SchedulerConfig, "max_num_seqs", 0, "[1, 65536]"),
        (SchedulerConfig, "max_batched_tokens", 1, "[2, 1048576]"),
        (SchedulerConfig, "max_waiting", 0, "[1, 1048576]"),
        (SchedulerConfig, "depth", 3, "[0, 2]"),
        (CacheConfig, "page_tokens", 0, "[1, 1024]"),
        (CacheConfig, "kv_bytes", 0, "[1, "),
        (DeviceConfig, "device", "tpu", "auto, cpu, cuda, sim"),
        (DeviceConfig, "threads", 0, "[1, 1024]"),
        (DeviceConfig, "sim_step_s", -1.0, "[0.0, 60.0]"),
        (ModelConfigArgs, "dtype", "int3", "auto, float32, bfloat16"),
        (ModelConfigArgs, "max_model_len", 0, "[1, "),
        (ModelConfigArgs, "model", "", "empty"),
        (ModelConfigArgs, "served_model_name", ("a", ""), "empty"),
        (EngineConfig, "max_logprobs", -1, "[0, 1024]"),
        (EngineConfig, "max_n", 0, "[1, 1024]"),
    ],
)
def test_a_wrong_value_is_named_with_its_limits(make, name, value, limit):
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    assert limit in caught.value.message


@pytest.mark.parametrize("key", ["", "with space", "naïve", "line\nbreak"])
def test_a_key_no_header_can_carry_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="api_key") as caught:
        ServerConfig(api_key=key)
    if key:
        assert key not in caught.value.message


def test_limits_themselves_are_allowed():
    assert ServerConfig(port=0).port == 0
    assert ServerConfig(port=65_535).port == 65_535
    assert SchedulerConfig(depth=0).depth == 0
    assert CacheConfig(kv_bytes=1).kv_bytes == 1


def test_values_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1


def test_home_is_a_folder_of_the_user_or_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path))
    assert config.home() == tmp_path
    monkeypatch.setenv("AENGINE_HOME", "~/models")
    assert config.home() == Path.home() / "models"
    for unset in ("", None):
        monkeypatch.delenv("AENGINE_HOME")
        if unset is not None:
            monkeypatch.setenv("AENGINE_HOME", unset)
        else:
            assert "AENGINE_HOME" not in config.os.environ
        assert config.home() == Path.home() / ".cache" / "aengine"
        monkeypatch.setenv("AENGINE_HOME", "x")


def test_environment_holds_the_prefixed_variables_alone(monkeypatch):
    monkeypatch.setenv("AENGINE_HOME", "/somewhere")
    monkeypatch.setenv("AENGINE_PORT", "9000")
    monkeypatch.setenv("OTHER_PORT", "1")
    assert config.environment() == {"port": "9000"}
