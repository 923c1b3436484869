"""One tree, three sources: flags, variables and a file."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.cli import settings
from aengine.cli.options import Parser, add_settings, config_of
from aengine.config import AengineConfig, ServerConfig
from aengine.errors import ConfigError

BY_NAME = {setting.name: setting for setting in settings.settings()}


def configured(argv=(), *, file=None, tmp_path=None):
    parser = Parser("test", "a test")
    add_settings(parser, server=True)
    argv = list(argv)
    if file is not None:
        path = tmp_path / "config.yaml"
        path.write_text(file, encoding="utf-8")
        argv += ["--config", str(path)]
    return config_of(parser.read(argv))


def parsed(name, raw):
    return settings.parse(BY_NAME[name], raw, "here")


def test_a_name_is_unique_and_every_setting_explains_itself():
    names = [setting.name for setting in settings.settings()]
    assert len(names) == len(set(names))
    assert all(setting.help for setting in settings.settings())
    assert {"model", "dtype", "max_model_len", "max_num_seqs", "max_batched_tokens", "depth", "kv_bytes"} <= set(names)
    assert {"threads", "device", "host", "port", "api_key"} <= set(names)


def test_nothing_given_is_the_default():
    assert configured() == AengineConfig()


def test_precedence_is_flag_variable_file_default(monkeypatch, tmp_path):
    file = "port: 1\nmax_num_seqs: 1\ndepth: 0\n"
    monkeypatch.setenv("AENGINE_PORT", "2")
    monkeypatch.setenv("AENGINE_MAX_NUM_SEQS", "2")
    config = configured(["--port", "3"], file=file, tmp_path=tmp_path)
    assert config.server.port == 3
    assert config.engine.scheduler.max_num_seqs == 2
    assert config.engine.scheduler.depth == 0
    assert config.engine.max_n == 128


def test_every_setting_reaches_its_place_from_each_source(monkeypatch, tmp_path):
    """A value unlike the default, given as flag, as variable and as YAML, gives three equal configs."""
    texts = {
        str: "text",
        int: "7",
        float: "2.5",
    }
    for setting in settings.settings():
        text = setting.choices[-1] if setting.choices else "a,b" if setting.is_list else texts.get(setting.kind)
        text = {"depth": "2", "max_body_bytes": "2048", "max_upload_bytes": "2048"}.get(setting.name, text)
        flag = [text] if setting.name == "model" else [setting.flag, text]
        if setting.kind is bool:
            text = "false" if setting.default else "true"
            flag = ["--no-" + setting.flag.removeprefix("--")] if setting.default else [setting.flag]
        by_flag = configured(flag)
        by_file = configured(file=f"{setting.name}: {text}\n", tmp_path=tmp_path)
        monkeypatch.setenv(setting.variable, text)
        by_variable = configured()
        monkeypatch.delenv(setting.variable)
        assert by_flag == by_file == by_variable, setting.name
        assert settings.value_of(by_flag, setting) != setting.default, setting.name


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1073741824", 2**30),
        ("2GiB", 2**31),
        ("512MiB", 2**29),
        ("512 mib", 2**29),
        ("1.5KiB", 1536),
        ("64k", 64_000),
        ("3MB", 3_000_000),
        ("1T", 10**12),
        ("10b", 10),
        (4096, 4096),
    ],
)
def test_sizes(text, n_bytes):
    assert parsed("kv_bytes", text) == n_bytes


@pytest.mark.parametrize("text", ["2 gigs", "GiB", "-1", "1e9", " ", True, 1.5, [], {}])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"kv_bytes is .*, not auto or a size such as"):
        parsed("kv_bytes", text)


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("port", "x", "a whole number"),
        ("port", "1.5", "a whole number"),
        ("port", 1.0, "a whole number"),
        ("port", True, "a whole number"),
        ("port", [1], "a whole number"),
        ("keepalive_s", "soon", "a number"),
        ("keepalive_s", False, "a number"),
        ("prefix_caching", "perhaps", "true or false"),
        ("prefix_caching", 1, "true or false"),
        ("dtype", "fp8", "one of auto, float32, bfloat16"),
        ("host", 12, "text"),
        ("cors_origins", [1], "a list of texts"),
        ("cors_origins", 5, "a list of texts"),
        ("speculate", "maybe", "auto, off or a whole number"),
        ("step_ms", "soon", "auto, off or a number"),
        ("max_model_len", "long", "auto or a whole number"),  # off would be 0, which is no length
        ("kv_bytes", "big", "auto or a size such as 512MiB, 2GiB or 1073741824"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_is_expected(name, raw, expected):
    with pytest.raises(ConfigError) as caught:
        parsed(name, raw)
    assert caught.value.message == f"here: {name} is {raw!r}, not {expected}"
    assert caught.value.param == name


def test_a_key_of_the_wrong_kind_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        parsed("api_key", 12345678)
    assert "12345678" not in caught.value.message


def test_null_unsets_what_is_optional_and_nothing_else():
    assert parsed("api_key", None) is None
    assert parsed("kv_bytes", "") is None  # an emptied variable
    with pytest.raises(ConfigError, match="port has no value"):
        parsed("port", None)


def test_lists_come_as_commas_or_as_yaml_lists():
    assert parsed("cors_origins", "http://a, http://b,") == ("http://a", "http://b")
    assert parsed("cors_origins", ["http://a"]) == ("http://a",)


def test_the_message_names_where_a_bad_value_was_given(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"^--port: port is 70000, not in \[0, 65535\]$"):
        configured(["--port", "70000"])
    with pytest.raises(ConfigError, match=r"config.yaml: port is 70000"):
        configured(file="port: 70000", tmp_path=tmp_path)
    monkeypatch.setenv("AENGINE_PORT", "70000")
    with pytest.raises(ConfigError, match=r"^AENGINE_PORT: port is 70000"):
        configured()


def test_a_bad_value_that_a_stronger_source_replaces_does_no_harm(monkeypatch):
    monkeypatch.setenv("AENGINE_PORT", "70000")
    assert configured(["--port", "80"]).server.port == 80


def test_unknown_names_are_errors_with_near_matches(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml: unknown name max_num_seq; did you mean max_num_seqs"):
        configured(file="max_num_seq: 3", tmp_path=tmp_path)
    monkeypatch.setenv("AENGINE_API_KEYS", "x")
    with pytest.raises(
        ConfigError, match=r"environment: unknown name AENGINE_API_KEYS; did you mean AENGINE_API_KEY\?"
    ):
        configured()


def test_dashes_do_in_a_file(tmp_path):
    assert configured(file="max-num-seqs: 3", tmp_path=tmp_path).engine.scheduler.max_num_seqs == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "holds a list"),
        ("just text", "holds a str"),
        ("a: [", "is not YAML"),
        ("!!python/object:os.system {}", "is not YAML"),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        configured(file=text, tmp_path=tmp_path)


def test_a_file_that_is_missing_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        configured(["--config", str(tmp_path / "none.yaml")])
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        configured(["--config", str(tmp_path / "bytes.yaml")])


def test_an_empty_file_changes_nothing(tmp_path):
    assert configured(file="# nothing\n", tmp_path=tmp_path) == AengineConfig()


names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters=","), min_size=1)


@given(
    host=names,
    model=names,
    origins=st.lists(names, max_size=3),
    keepalive_s=st.floats(0.1, 3600.0),
    kv_bytes=st.none() | st.integers(1, 2**50),
    prefix_caching=st.booleans(),
    level=st.sampled_from(["debug", "info", "warning", "error"]),
)
def test_printed_yaml_gives_the_same_config_back(
    tmp_path_factory, host, model, origins, keepalive_s, kv_bytes, prefix_caching, level
):
    base = AengineConfig(
        server=ServerConfig(host=host, cors_origins=tuple(origins), keepalive_s=keepalive_s, log_level=level)
    )
    engine = dataclasses.replace(
        base.engine,
        model=dataclasses.replace(base.engine.model, model=model),
        cache=dataclasses.replace(base.engine.cache, kv_bytes=kv_bytes, prefix_caching=prefix_caching),
    )
    config = AengineConfig(engine, base.server)
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(settings.to_yaml(config), encoding="utf-8")
    assert settings.build(settings.read_file(str(path))) == config


def test_printed_yaml_keeps_the_key_to_itself():
    text = settings.to_yaml(AengineConfig(server=ServerConfig(api_key="very-secret")))
    assert "very-secret" not in text
    assert "api_key: set" in text
