"""What public tools say of an artifact: they accept what is made here, and refuse it where it was tampered with.

Each test is skipped where its tool is not installed. They are looked for on the PATH and in the folder that the
variable PUBLIC_TOOLS names, such as the `bin` of an environment made for them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from shardline.artifact.bundle import SIGNATURE_NAME, TORRENT_NAME, Bundle
from shardline.artifact.signing import new_key, public_pem
from tests.support.artifacts import big_gguf, publisher, safetensors_folder, signed_bundle, split_gguf

SEARCHED = os.pathsep.join((os.environ.get("PUBLIC_TOOLS", ""), os.environ.get("PATH", "")))


def tool(name: str, advice: str) -> str:
    found = shutil.which(name, path=SEARCHED)
    if found is None:
        pytest.skip(f"{name} is not installed: {advice}")
    return found


def model_signing(bundle: Bundle, tmp_path: Path, key: Any = None) -> subprocess.CompletedProcess[str]:
    program = tool("model_signing", "pip install model-signing==1.1.1 pyOpenSSL")
    public = tmp_path / "publisher.pem.pub"
    public.write_bytes(public_pem((key or publisher()).public_key()))
    signature = bundle.folder / SIGNATURE_NAME
    command = [program, "verify", "key", bundle.folder, "--public_key", public, "--signature", signature]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=50, check=False)


def test_model_signing_verifies_a_bundle(tmp_path: Path) -> None:
    bundle = signed_bundle(safetensors_folder(tmp_path / "model"), tmp_path / "art")
    done = model_signing(bundle, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Verification succeeded" in done.stdout + done.stderr


@pytest.mark.parametrize("harm", ["changed", "added", "removed", "other key"])
def test_model_signing_refuses_a_tampered_one(tmp_path: Path, harm: str) -> None:
    bundle = signed_bundle(safetensors_folder(tmp_path / "model"), tmp_path / "art")
    path = bundle.folder / "files" / "LICENSE"
    if harm == "changed":
        path.write_text("not free")
    elif harm == "added":
        path.with_name("more").write_text("more")
    elif harm == "removed":
        path.unlink()
    done = model_signing(bundle, tmp_path, new_key() if harm == "other key" else None)
    assert done.returncode != 0


def test_openssl_verifies_a_signature(tmp_path: Path) -> None:
    """By hand, as docs/artifacts.md says it."""
    import base64

    program = tool("openssl", "apt install openssl")
    bundle = signed_bundle(big_gguf(tmp_path), tmp_path / "art")
    envelope = json.loads((bundle.folder / SIGNATURE_NAME).read_bytes())["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    kind = envelope["payloadType"]
    (tmp_path / "signed").write_bytes(f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload)
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    (tmp_path / "key").write_bytes(public_pem(publisher().public_key()))
    command = [program, "dgst", "-sha256", "-verify", "key", "-signature", "signature", "signed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "Verified OK\n")


def lay_out(bundle: Bundle, model: Path, target: Path) -> Path:
    """The model's files where clients of the torrent look for them."""
    source = model if model.is_dir() else model.parent
    for entry in bundle.manifest.files:
        path = target / bundle.manifest.torrent_path(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / entry.path, path)
    return target


LIBTORRENT = """
import json, sys, time
import libtorrent as lt
raw = open(sys.argv[1], "rb").read()
params = lt.load_torrent_buffer(raw)
info = params.ti
settings = {"listen_interfaces": "127.0.0.1:0", "enable_dht": False, "enable_lsd": False, "enable_upnp": False,
            "enable_natpmp": False}
session = lt.session(settings)
params.save_path = sys.argv[2]
params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
handle = session.add_torrent(params)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    status = handle.status()
    if status.state in (lt.torrent_status.seeding, lt.torrent_status.downloading):
        break
    time.sleep(0.02)
print(json.dumps({
    "state": str(status.state), "pieces": status.num_pieces, "total": info.num_pieces(), "name": info.name(),
    "v2": str(info.info_hashes().v2), "v1": info.info_hashes().has_v1(),
    "same": bytes(lt.bencode(lt.write_torrent_file(params))) == raw,
}))
"""


def python_with_libtorrent() -> str:
    for name in ("python3", "python"):
        for folder in SEARCHED.split(os.pathsep):
            program = shutil.which(name, path=folder) if folder else None
            if (
                program
                and not subprocess.run(
                    [program, "-c", "import libtorrent"], capture_output=True, timeout=30, check=False
                ).returncode
            ):
                return program
    pytest.skip("libtorrent is not installed: pip install libtorrent==2.1.1")


def libtorrent(bundle: Bundle, folder: Path) -> dict[str, Any]:
    command = [python_with_libtorrent(), "-c", LIBTORRENT, str(bundle.folder / TORRENT_NAME), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("form", ["gguf", "split", "safetensors"])
def test_libtorrent_finds_the_model_whole(tmp_path: Path, form: str) -> None:
    (tmp_path / "models").mkdir()
    model = {
        "gguf": lambda: big_gguf(tmp_path / "models"),
        "split": lambda: split_gguf(tmp_path / "models")[0],
        "safetensors": lambda: safetensors_folder(tmp_path / "models" / "model"),
    }[form]()
    bundle = signed_bundle(model, tmp_path / "art")
    found = libtorrent(bundle, lay_out(bundle, model, tmp_path / "there"))
    assert (found["state"], found["pieces"]) == ("seeding", found["total"])
    assert found["v2"] == bundle.manifest.transport.bittorrent.info_hash_v2
    assert (found["v1"], found["name"], found["same"]) == (False, bundle.manifest.name, True)


def test_libtorrent_misses_the_pieces_that_are_wrong(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    bundle = signed_bundle(model, tmp_path / "art")
    path = lay_out(bundle, model, tmp_path / "there") / model.name
    raw = bytearray(path.read_bytes())
    raw[3 * bundle.manifest.piece_length] ^= 1
    path.write_bytes(raw)
    found = libtorrent(bundle, tmp_path / "there")
    assert (found["state"], found["pieces"], found["total"]) == ("downloading", 4, 5)


QBITTORRENT = """[LegalNotice]
Accepted=true
[BitTorrent]
Session\\DHTEnabled=false
Session\\LSDEnabled=false
Session\\PeXEnabled=false
Session\\InterfaceAddress=127.0.0.1
[Network]
PortForwardingEnabled=false
[Preferences]
WebUI\\Address=127.0.0.1
WebUI\\LocalHostAuth=false
"""


@contextmanager
def qbittorrent(bundle: Bundle, files: Path, profile: Path) -> Iterator[str]:
    """The URL of the web interface of a client that was given the torrent, and the folder with the files."""
    program = tool("qbittorrent-nox", "apt install qbittorrent-nox")
    (profile / "qBittorrent" / "config").mkdir(parents=True)
    (profile / "qBittorrent" / "config" / "qBittorrent.conf").write_text(QBITTORRENT)
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        program, f"--profile={profile}", f"--webui-port={port}", f"--save-path={files}", "--add-paused=false",
        "--skip-dialog=true", str(bundle.folder / TORRENT_NAME),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def listed(url: str) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/api/v2/torrents/info", timeout=2) as answer:
            found: list[dict[str, Any]] = json.load(answer)
            return found
    except OSError:
        return []


def test_qbittorrent_seeds_the_model(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    bundle = signed_bundle(model, tmp_path / "art")
    files = lay_out(bundle, model, tmp_path / "there")
    with qbittorrent(bundle, files, tmp_path / "profile") as url:
        deadline = time.monotonic() + 40
        found: list[dict[str, Any]] = []
        while time.monotonic() < deadline and not (found and found[0]["progress"] == 1):
            time.sleep(0.05)
            found = listed(url)
    assert [entry["infohash_v2"] for entry in found] == [bundle.manifest.transport.bittorrent.info_hash_v2]
    assert (found[0]["progress"], found[0]["name"], found[0]["infohash_v1"]) == (1, model.name, "")
