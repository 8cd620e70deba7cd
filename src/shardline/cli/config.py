"""Configuration: defaults, then the file, then the environment, then flags; each value knows where it came from.

Owns every read of the environment in Shardline, the names of the file's keys and of the variables, and what values
may be. Refuses unknown names everywhere, with the nearest known one. What the values mean is settings.py's.
Shown by tests/cli/test_config.py.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardline.cli.running import RunningCluster, ambiguous, running_clusters
from shardline.errors import ShardlineError
from shardline.options import KEYS_FILE, OPERATOR_FILE
from shardline.settings import Settings

PREFIX = "SHARDLINE_"
CONFIG_VARIABLE = "SHARDLINE_CONFIG"
CREDENTIAL_FILE = "credential"
"""Name in the state folder."""
_MAY_BE_ZERO = frozenset(
    {
        "worker_restarts",
        "prefix_sessions",
        "store_reserve_bytes",
        "fetch_bytes_per_s",
        "upload_bytes_per_s",
        "bittorrent_port",
        "bittorrent_connections",
    }
)


class Places(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the commands of this machine find each other, and how they log."""

    tracker: str = "http://127.0.0.1:7070"
    """URL of the Tracker."""
    gateway: str = "http://127.0.0.1:8080"
    """URL of the Gateway."""
    state_dir: str = "~/.local/state/shardline"
    """Folder for the credential, keys, logs and caches. Follows XDG_STATE_HOME where that is set."""
    credential_file: str = ""
    """File with the cluster credential; empty: the one in the state folder, made by what starts a cluster."""
    api_keys_file: str = ""
    """Gateway: file with the API keys that clients must send, one a line; empty: none is asked for."""
    api_key: str = ""
    """`chat` and `sessions`: the key to send to the Gateway."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console lines on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the lines that are written."""


SECRET = frozenset({"api_key"})
URLS = frozenset({"tracker", "gateway"})
_FLAGS = {"api_keys_file": "--api-keys"}
"""Flags that are called otherwise than their key."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values: `where` names it for a person, per key."""

    values: Mapping[str, Any]
    where: Mapping[str, str]
    strict: bool
    """False: values are text (environment, flags) and are read as what the key wants."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The merged result."""

    settings: Settings
    places: Places
    sources: Mapping[str, str]
    """Key -> where its value came from, for every key."""
    clusters: Sequence[RunningCluster] = ()
    """Those that run on this machine with this state folder."""

    def url(self, place: Literal["gateway", "tracker"]) -> str:
        """Where the Gateway or the Tracker is; `cluster_ambiguous` where nobody said and several could be meant."""
        if self.sources[place] == "default" and len(self.clusters) > 1:
            raise ambiguous(place, self.clusters)
        return str(getattr(self.places, place))

    @property
    def state_dir(self) -> Path:
        return Path(self.places.state_dir).expanduser()

    @property
    def credential_path(self) -> Path:
        given = self.places.credential_file
        return Path(given).expanduser() if given else self.state_dir / CREDENTIAL_FILE

    @property
    def kept_keys(self) -> Path:
        """What `shardline keys` has made."""
        return self.state_dir / KEYS_FILE

    @property
    def has_kept_keys(self) -> bool:
        """A Gateway with this state folder asks for keys that `shardline keys` has made."""
        return self.kept_keys.exists()

    def own_key(self) -> str:
        """The key of this machine's own commands, for a Gateway of this state folder; empty where there is none."""
        path = self.state_dir / OPERATOR_FILE
        try:
            return path.read_text(encoding="ascii").strip() if self.has_kept_keys else ""
        except (OSError, UnicodeDecodeError):
            return ""  # the Gateway says what it lacks

    def api_keys(self) -> tuple[str, ...]:
        """The keys of `api_keys_file`, without blank lines and `#` comments."""
        if not self.places.api_keys_file:
            return ()
        path = Path(self.places.api_keys_file).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise self._invalid("api_keys_file", f"{path} cannot be read: {error}") from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not keys:
            raise self._invalid("api_keys_file", f"{path} holds no key")
        return keys

    def _invalid(self, key: str, why: str) -> ShardlineError:
        return _invalid(key, why, _fix((key, self.sources[key])))

    def rows(self) -> list[tuple[str, str, str]]:
        """(key, value as shown, source) of every key; a secret is shown as set or not."""
        shown = []
        for part in (self.places, self.settings):
            for name, value in msgspec.structs.asdict(part).items():
                text = ("(set)" if value else "") if name in SECRET else str(value)
                shown.append((name, text, self.sources[name]))
        return shown


_FIELDS = {f.name: f for struct in (Places, Settings) for f in msgspec.structs.fields(struct)}


def _invalid(key: str, why: str, advice: str) -> ShardlineError:
    return ShardlineError("setting_invalid", f"{key}: {why}", param=key, advice=advice)


def _fix(*given: tuple[str, str]) -> str:
    """What to correct, of keys with where each came from: the flag, the variable, or the line of the file."""
    places = []
    for key, where in given:
        kind, _, name = where.partition(" ")
        if where == "flag --set":
            places.append(f"--set {key}=…")
        elif kind in ("flag", "environment"):
            places.append(name)
        elif where != "default":
            places.append(f"{key} in {where}")
    return f"Correct {' or '.join(places)}."


def _unknown(name: str, where: str, known: Sequence[str]) -> ShardlineError:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else "; `shardline config show` lists all"
    advice = "`shardline config show` lists all settings, their values, and where each came from."
    return _invalid(name, f"no setting of this name ({where}){hint}", advice)


def file_layer(path: Path) -> Layer:
    """The TOML file at `path`: one flat table."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        advice = f"Correct {path}, or name another file: shardline --config FILE …"
        raise _invalid("config", f"{path} cannot be read: {error}", advice) from None
    return Layer(values, {key: str(path) for key in values}, strict=True)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Every `SHARDLINE_…` variable; one that names nothing is an error, as a misspelt key in the file is."""
    values: dict[str, str] = {}
    where: dict[str, str] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key not in _FIELDS:
            raise _unknown(variable, "environment", [PREFIX + k.upper() for k in _FIELDS])
        values[key] = text
        where[key] = f"environment {variable}"
    return Layer(values, where, strict=False)


def flag_layer(places: Mapping[str, str | None], assignments: Sequence[str]) -> Layer:
    """Flags of the command line, and `--set NAME=VALUE` for any key."""
    values = {key: text for key, text in places.items() if text is not None}
    where = {key: f"flag {_FLAGS.get(key) or '--' + key.replace('_', '-')}" for key in values}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            advice = "Write --set NAME=VALUE, such as --set drain_s=10; `shardline config show` lists the names."
            raise _invalid("--set", f"{assignment!r} is not of the form NAME=VALUE", advice)
        values[key.strip()] = text.strip()
        where[key.strip()] = "flag --set"
    return Layer(values, where, strict=False)


def config_path(flag: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file that is named must be there; the usual one is read only where it is."""
    named = flag or environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named).expanduser()
    folder = environ.get("XDG_CONFIG_HOME") or "~/.config"
    usual = Path(folder).expanduser() / "shardline" / "config.toml"
    return usual if usual.is_file() else None


def default_layer(environ: Mapping[str, str]) -> Layer:
    """What XDG variables say about the defaults."""
    folder = environ.get("XDG_STATE_HOME")
    if not folder:
        return Layer({}, {}, strict=True)
    return Layer(
        {"state_dir": str(Path(folder) / "shardline")}, {"state_dir": "environment XDG_STATE_HOME"}, strict=True
    )


def running_layer(clusters: Sequence[RunningCluster]) -> Layer:
    """URLs of the cluster that runs on this machine, so that commands need no flag; empty unless there is just one."""
    if len(clusters) != 1:
        return Layer({}, {}, strict=True)
    (only,) = clusters
    values = {"tracker": only.tracker, "gateway": only.gateway}
    return Layer(values, dict.fromkeys(values, f"cluster run by process {only.pid}"), strict=True)


def merge(layers: Sequence[Layer]) -> Configuration:
    """Later layers win. Every value is checked, whichever wins."""
    sources = dict.fromkeys(_FIELDS, "default")
    values: dict[str, Any] = {}
    for layer in layers:
        for key, raw in layer.values.items():
            field = _FIELDS.get(key)
            if field is None:
                raise _unknown(key, layer.where[key], list(_FIELDS))
            try:
                value = msgspec.convert(raw, field.type, strict=layer.strict)
            except msgspec.ValidationError as error:
                shown = "the value" if key in SECRET else repr(raw)
                why = f"{shown} ({layer.where[key]}) does not fit: {error}"
                raise _invalid(key, why, _fix((key, layer.where[key]))) from None
            _check_number(key, value, layer.where[key])
            if key in URLS:
                value = normal_url(value)
                _check_url(key, value, layer.where[key])
            values[key] = value
            sources[key] = layer.where[key]
    settings = Settings(**{k: v for k, v in values.items() if k in Settings.__struct_fields__})
    places = Places(**{k: v for k, v in values.items() if k in Places.__struct_fields__})
    _check_relations(settings, sources)
    return Configuration(settings, places, sources)


def resolve(
    *, flags: Mapping[str, str | None], assignments: Sequence[str], config: str | None, environ: Mapping[str, str]
) -> Configuration:
    """The whole way from the command line and the environment to checked values."""
    path = config_path(config, environ)
    layers = [default_layer(environ)]
    if path is not None:
        layers.append(file_layer(path))
    layers += [environment_layer(environ), flag_layer(flags, assignments)]
    found = merge(layers)
    clusters = running_clusters(found.state_dir)
    return replace(merge([layers[0], running_layer(clusters), *layers[1:]]), clusters=tuple(clusters))


def normal_url(text: str) -> str:
    """`text` as a URL of a Gateway or Tracker: http where no scheme is named, and without the /v1 that API clients are
    given."""
    url = text.strip()
    if "://" not in url:
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _check_url(key: str, value: str, where: str) -> None:
    from shardline.transport.addresses import split_url

    try:
        split_url(value)
    except ShardlineError as error:
        raise _invalid(key, f"{error.message} ({where})", _fix((key, where))) from None


def _check_number(key: str, value: object, where: str) -> None:
    if isinstance(value, float) and not (math.isfinite(value) and value > 0):
        raise _invalid(key, f"{value} ({where}) is not a finite number above 0", _fix((key, where)))
    least = 0 if key in _MAY_BE_ZERO else 1
    if isinstance(value, int) and value < least:
        raise _invalid(key, f"{value} ({where}) is less than {least}", _fix((key, where)))


def _check_relations(s: Settings, sources: Mapping[str, str]) -> None:
    """Values that are each fine and together are not: a beat that is always late, a pool that meets dead sockets."""
    ascending = (
        ("beat_interval_s", "beat_timeout_s"),
        ("tracker_heartbeat_s", "tracker_expiry_s"),
        ("client_idle_s", "server_idle_s"),
    )
    for low, high in ascending:
        if not getattr(s, low) < getattr(s, high):
            why = f"{getattr(s, high)} must be above {low}, which is {getattr(s, low)}"
            raise _invalid(high, why, _fix((low, sources[low]), (high, sources[high])))
    for key in ("prefill_chunk_min", "prefill_chunk_max"):
        if getattr(s, key).bit_count() != 1:
            raise _invalid(key, f"{getattr(s, key)} is not a power of two", _fix((key, sources[key])))
    if s.prefill_chunk_min > s.prefill_chunk_max:
        low, high = "prefill_chunk_min", "prefill_chunk_max"
        why = f"{s.prefill_chunk_min} is above {high}, {s.prefill_chunk_max}"
        raise _invalid(low, why, _fix((low, sources[low]), (high, sources[high])))
