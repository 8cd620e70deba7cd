"""Which source of a setting wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cli.config import Configuration, resolve
from shardline.cli.running import RunningCluster, entered
from shardline.errors import ShardlineError
from shardline.settings import Settings


def resolved(
    tmp_path: Path,
    *,
    toml: str | None = None,
    environ: dict[str, str] | None = None,
    assignments: tuple[str, ...] = (),
    **flags: str,
) -> Configuration:
    config = None
    if toml is not None:
        file = tmp_path / "config.toml"
        file.write_text(toml, encoding="utf-8")
        config = str(file)
    world = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "none"), **(environ or {})}
    return resolve(flags=dict(flags), assignments=assignments, config=config, environ=world)


def test_nothing_given_is_all_defaults(tmp_path: Path) -> None:
    found = resolved(tmp_path)
    assert found.settings == Settings()
    assert {source for key, source in found.sources.items() if key != "state_dir"} == {"default"}
    assert found.state_dir == tmp_path / "state" / "shardline"
    assert found.sources["state_dir"] == "environment XDG_STATE_HOME"


@given(
    st.tuples(st.none() | st.floats(0.1, 9), st.none() | st.floats(0.1, 9), st.none() | st.floats(0.1, 9)).filter(
        lambda given: any(v is not None for v in given)
    )
)
def test_the_later_source_wins(tmp_path_factory: pytest.TempPathFactory, values: tuple[float | None, ...]) -> None:
    in_file, in_environment, in_flag = values
    found = resolved(
        tmp_path_factory.mktemp("config"),
        toml="" if in_file is None else f"push_s = {in_file!r}",
        environ={} if in_environment is None else {"SHARDLINE_PUSH_S": repr(in_environment)},
        assignments=() if in_flag is None else (f"push_s={in_flag!r}",),
    )
    assert found.settings.push_s == next(v for v in (in_flag, in_environment, in_file) if v is not None)
    source = found.sources["push_s"]
    assert ("flag" in source, "environment" in source) == (
        in_flag is not None,
        in_flag is None and in_environment is not None,
    )


def test_every_setting_is_reachable_from_every_source(tmp_path: Path) -> None:
    for name, value in msgspec.structs.asdict(Settings()).items():
        changed = "http://localhost:3000" if isinstance(value, str) else value * 2
        partner = "" if isinstance(changed, str) else _partner(name, changed)
        for found in (
            resolved(tmp_path, toml=f"{name} = {changed!r}\n{partner}"),
            resolved(tmp_path, environ={f"SHARDLINE_{name.upper()}": str(changed)}, toml=partner),
            resolved(tmp_path, assignments=(f"{name}={changed}",), toml=partner),
        ):
            assert getattr(found.settings, name) == changed, name


def _partner(name: str, value: float) -> str:
    """The value that must stay above a doubled one."""
    above = {
        "beat_interval_s": "beat_timeout_s",
        "tracker_heartbeat_s": "tracker_expiry_s",
        "client_idle_s": "server_idle_s",
    }.get(name)
    return "" if above is None else f"{above} = {value * 3!r}"


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("beat_timeot_s=1", "did you mean beat_timeout_s"),
        ("push_s=fast", "'fast' (flag --set) does not fit"),
        ("push_s=0", "above 0"),
        ("push_s=-1", "above 0"),
        ("push_s=inf", "finite"),
        ("push_s=nan", "finite"),
        ("queue_limit=0", "less than 1"),
        ("queue_limit=1.5", "does not fit"),
        ("beat_timeout_s=0.4", "must be above beat_interval_s"),
        ("server_idle_s=10", "must be above client_idle_s"),
        ("prefill_chunk_max=300", "not a power of two"),
        ("prefill_chunk_max=8", "above prefill_chunk_max"),
        ("push_s", "not of the form NAME=VALUE"),
        ("tracker=ftp://localhost:7070", "not an http URL"),
        ("log_level=loud", "does not fit"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, assignment: str, words: str) -> None:
    with pytest.raises(ShardlineError) as refused:
        resolved(tmp_path, assignments=(assignment,))
    assert refused.value.code == "setting_invalid"
    assert words in refused.value.message
    assert assignment.partition("=")[0] in (refused.value.message + str(refused.value.param))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("http://10.0.0.1:8080/", "http://10.0.0.1:8080"),
        ("http://10.0.0.1:8080/v1", "http://10.0.0.1:8080"),
        ("https://x.lan/v1/", "https://x.lan"),
        ("https://x.lan/behind/v1", "https://x.lan/behind"),
        ("10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("[::1]:8080/v1", "http://[::1]:8080"),
        (" localhost ", "http://localhost"),
    ],
)
def test_a_url_may_be_written_as_people_do(tmp_path: Path, text: str, url: str) -> None:
    found = resolved(tmp_path, gateway=text, environ={"SHARDLINE_TRACKER": text})
    assert (found.url("gateway"), found.url("tracker")) == (url, url)


def test_a_value_that_loses_is_checked_as_well(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match=r"environment SHARDLINE_PUSH_S"):
        resolved(tmp_path, environ={"SHARDLINE_PUSH_S": "soon"}, assignments=("push_s=1",))


def test_unknown_names_are_refused_in_file_and_environment(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match=r"config\.toml.*did you mean push_s"):
        resolved(tmp_path, toml="push = 1")
    with pytest.raises(ShardlineError, match="did you mean SHARDLINE_TRACKER"):
        resolved(tmp_path, environ={"SHARDLINE_TRAKER": "http://127.0.0.1:1"})


def test_a_file_that_is_named_must_be_there_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="cannot be read"):
        resolved(tmp_path, environ={"SHARDLINE_CONFIG": str(tmp_path / "absent.toml")})
    with pytest.raises(ShardlineError, match="cannot be read"):
        resolved(tmp_path, toml="push_s = = 1")


def test_the_usual_file_is_read_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "shardline"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("push_s = 7", encoding="utf-8")
    found = resolved(tmp_path, environ={"XDG_CONFIG_HOME": str(tmp_path / "configs")})
    assert found.settings.push_s == 7
    assert found.sources["push_s"] == str(folder / "config.toml")


def running(number: int) -> RunningCluster:
    return RunningCluster(
        pid=number, tracker=f"http://127.0.0.1:1{number}", gateway=f"http://127.0.0.1:2{number}", what="up m.gguf"
    )


def test_a_running_cluster_is_found_and_everything_else_wins_over_it(tmp_path: Path) -> None:
    with entered(tmp_path / "state" / "shardline", running(11)):
        found = resolved(tmp_path, environ={"SHARDLINE_GATEWAY": "http://127.0.0.1:1003"})
    assert (found.url("tracker"), found.url("gateway")) == ("http://127.0.0.1:111", "http://127.0.0.1:1003")
    assert found.sources["tracker"] == "cluster run by process 11"


def test_of_several_running_clusters_none_is_taken_unless_it_is_named(tmp_path: Path) -> None:
    state = tmp_path / "state" / "shardline"
    with entered(state, running(11)), entered(state, running(12)):
        found = resolved(tmp_path, environ={"SHARDLINE_GATEWAY": "http://127.0.0.1:212"})
        assert found.url("gateway") == "http://127.0.0.1:212"
        with pytest.raises(ShardlineError, match=r"http://127\.0\.0\.1:111") as asked:
            found.url("tracker")
    assert asked.value.code == "cluster_ambiguous"
    assert resolved(tmp_path).url("tracker") == "http://127.0.0.1:7070"


def test_secrets_are_shown_as_set_only(tmp_path: Path) -> None:
    secret = "sk-very-secret-0123456789"
    found = resolved(tmp_path, environ={"SHARDLINE_API_KEY": secret})
    rows = {name: value for name, value, _ in found.rows()}
    assert rows["api_key"] == "(set)"
    assert secret not in str(rows)
    assert found.places.api_key == secret


def test_api_keys_are_lines_without_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nsk-one\n\n  sk-two  \n", encoding="utf-8")
    assert resolved(tmp_path, api_keys_file=str(file)).api_keys() == ("sk-one", "sk-two")
    assert resolved(tmp_path).api_keys() == ()
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ShardlineError, match="holds no key"):
        resolved(tmp_path, api_keys_file=str(file)).api_keys()
