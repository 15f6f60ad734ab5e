"""The config file and the environment: what they may say, and what a mistake in them is."""

import os
import tomllib
from pathlib import Path

import pytest

from clover_local.cli.preferences import (
    ALL_KEYS,
    FILE_VARIABLE,
    config_path,
    read_preferences,
    template,
)
from clover_local.errors import SettingsError


def read(text: str | bytes, folder: Path, **variables: str) -> dict[str, tuple[object, str]]:
    """(value, place) by key, of a file with `text` and an environment."""
    path = folder / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = read_preferences({FILE_VARIABLE: str(path), **variables})
    return {key: (each.value, each.source) for key, each in found.values.items()}


def test_the_file_is_in_the_config_folder_unless_a_variable_names_another() -> None:
    home = Path("~/.config/clover-local/config.toml").expanduser()
    assert config_path({}) == home
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/clover-local/config.toml")
    assert config_path({FILE_VARIABLE: "~/y.toml"}) == Path("~/y.toml").expanduser()
    assert config_path({FILE_VARIABLE: ""}) == home
    assert config_path({FILE_VARIABLE: os.devnull}) is None
    assert read_preferences({FILE_VARIABLE: os.devnull}).values == {}


def test_keys_are_the_names_of_flags_and_values_have_their_types(tmp_path: Path) -> None:
    text = """
    max-new-tokens = 300
    threshold = 1
    suppress = [5, 17]
    auto = ["ar", "draft"]
    eos_order = true
    system = "Be brief."
    gpu_memory = "15360MiB"
    quiet = false
    """
    place = str(tmp_path / "config.toml")
    assert read(text, tmp_path) == {
        "max_new_tokens": (300, place),
        "threshold": (1.0, place),
        "suppress": ((5, 17), place),
        "auto": (("ar", "draft"), place),
        "eos_order": (True, place),
        "system": ("Be brief.", place),
        "gpu_memory": ("15360MiB", place),
        "quiet": (False, place),
    }


def test_the_environment_is_above_the_file_and_an_empty_variable_is_none(tmp_path: Path) -> None:
    found = read(
        "threshold = 0.5\nseed = 3\nmode = 'ar'",
        tmp_path,
        CLOVER_THRESHOLD="0.9",
        CLOVER_SEED="",
        CLOVER_QUIET="1",
        CLOVER_SUPPRESS="4,5",
    )
    assert found["threshold"] == (0.9, "CLOVER_THRESHOLD")
    assert found["seed"] == (3, str(tmp_path / "config.toml"))
    assert found["quiet"] == (True, "CLOVER_QUIET")
    assert found["suppress"] == ((4, 5), "CLOVER_SUPPRESS")
    assert found["mode"][0] == "ar"


def test_a_path_in_the_file_is_seen_from_the_files_folder(tmp_path: Path) -> None:
    found = read("expert_profile = 'mine.json'", tmp_path)
    assert found["expert_profile"][0] == tmp_path / "mine.json"
    found = read("", tmp_path, CLOVER_EXPERT_PROFILE="mine.json")
    assert found["expert_profile"][0] == Path("mine.json")


MISTAKES = [
    ("treshold = 0.9", "the unknown key 'treshold': did you mean threshold?"),
    ("sampler-gama = 1", "the unknown key 'sampler-gama': did you mean sampler_gamma?"),
    ("zzz = 1", "the unknown key 'zzz': known are mode, max_new_tokens"),
    ("threshold = 2", "threshold is 2: expected a number from 0 to 1; correct that line"),
    ("threshold = true", "threshold is True: expected a number from 0 to 1"),
    ("max_new_tokens = 2.5", "max_new_tokens is 2.5: expected a whole number of 1 or more"),
    ("mode = 'fast'", "mode is 'fast': expected one of denoise, ar, draft, auto"),
    ("device = 'gpu'", "device is 'gpu': expected one of cpu, cuda"),
    ("gpu_memory = '16'", "gpu_memory is '16': expected a size such as 16GB"),
    ("gpu_memory = 16", "gpu_memory is 16: expected a size such as 16GB"),
    ("quiet = 1", "quiet is 1: expected on or off"),
    ("context = 0", "context is 0: expected a whole number of 1 or more"),
    ("system = ''", "system is '': expected a text"),
    (r'model = "~a\u0000/"', "model is '~a\\x00/': expected a folder"),
    ("seed = 2026-01-01", "seed is datetime.date"),
    ("[chat]\nseed = 1", "the unknown key 'chat'"),
    ("[seed]\nx = 1", "seed is a table: keys stand without one"),
    ("max_new_tokens = 1\nmax-new-tokens = 2", "max_new_tokens twice"),
    ("threshold 0.9", "is no TOML ("),
    (b"\xff", "is no TOML ("),
    ("a = " + "[" * 5000, "is no TOML ("),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=[f"{t!r:.25}" for t, _ in MISTAKES])
def test_a_mistake_names_the_file_the_key_and_the_remedy(
    tmp_path: Path, text: str | bytes, words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(text, tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.toml"))
    assert words in message
    assert "\n" not in message


NOBODY = r"~no-such-user has no home folder: write the whole path"


def test_the_home_of_nobody_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"config\.toml: expert_profile is .*{NOBODY}"):
        read("expert_profile = '~no-such-user/x'", tmp_path)
    with pytest.raises(SettingsError, match=rf"CLOVER_EXPERT_PROFILE is .*{NOBODY}"):
        read("", tmp_path, CLOVER_EXPERT_PROFILE="~no-such-user/x")
    with pytest.raises(SettingsError, match=rf"CLOVER_CONFIG is .*{NOBODY}"):
        read_preferences({FILE_VARIABLE: "~no-such-user/c"})
    with pytest.raises(SettingsError, match="has a NUL in it"):
        read(r'expert_profile = "a\u0000b"', tmp_path)


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    assert read(b"\xef\xbb\xbfseed = 1", tmp_path)["seed"][0] == 1


def test_a_bad_variable_is_named_with_the_remedy() -> None:
    environment = {FILE_VARIABLE: os.devnull, "CLOVER_TOP_P": "2"}
    with pytest.raises(SettingsError, match=r"CLOVER_TOP_P is '2': expected .*; correct it, or"):
        read_preferences(environment)


def test_an_unknown_variable_is_reported_with_the_nearest_and_others_are_left_alone() -> None:
    environment = {
        FILE_VARIABLE: os.devnull,
        "CLOVER_DEBUG": "1",
        "CLOVER_KERNELS": "reference",
        "CLOVER_TRESHOLD": "0.9",
        "CLOVER_ZZZ": "1",
        "CLOVERLEAF": "1",
    }
    found = read_preferences(environment)
    assert found.values == {}
    assert [sentence.split(" ")[0] for sentence in found.unknown] == [
        "CLOVER_TRESHOLD",
        "CLOVER_ZZZ",
    ]
    assert found.unknown[0].endswith("did you mean CLOVER_THRESHOLD?")


def test_a_named_file_has_to_be_there_and_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"CLOVER_CONFIG names .*absent\.toml, which is not"):
        read_preferences({FILE_VARIABLE: str(tmp_path / "absent.toml")})
    with pytest.raises(SettingsError, match=r"cannot be read .*CLOVER_CONFIG=/dev/null"):
        read_preferences({FILE_VARIABLE: str(tmp_path)})
    assert read_preferences({"XDG_CONFIG_HOME": str(tmp_path)}).values == {}


def test_the_template_sets_nothing_and_each_of_its_lines_may_be_used(tmp_path: Path) -> None:
    defaults = {"threshold": 0.95, "mode": "denoise", "auto": ("ar", "draft"), "eos_order": False}
    text = template(defaults.get)
    assert tomllib.loads(text) == {}
    lines = [line[1:] for line in text.splitlines() if line[:1] == "#" and line[1:2] != " "]
    assert [line.partition(" = ")[0] for line in lines] == list(ALL_KEYS)
    used = [line for line in lines if line.partition(" = ")[0] in defaults]
    found = read("\n".join(used), tmp_path)
    assert {key: value for key, (value, _) in found.items()} == defaults
