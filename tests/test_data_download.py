"""data/cached_fineweb10B.py against a stand-in hub: good, missing, truncated, slow and dead sources."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_helpers import DATA, EOT, StandInHub, assert_user_error, run, shard, shards_in

import cached_fineweb10B
import shards

SCRIPT = "cached_fineweb10B.py"
REPOSITORY = "kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 7))]
FILES = {name: shard([EOT, *range(i, 20_000 + i)]) for i, name in enumerate(NAMES)}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty cache of the hub, nothing of the user's settings, and an endpoint at which nobody listens."""
    return {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1", "HF_ENDPOINT": "http://127.0.0.1:9"}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetches_several_at_once_then_keeps_quiet(tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "new" / "out put"
    with StandInHub(REPOSITORY, FILES, {name: ["slow"] for name in NAMES}) as hub:
        first = run(SCRIPT, 6, "--out", out, **environment | {"HF_ENDPOINT": hub.url})
        assert first.returncode == 0, first.stderr
        assert first.stdout == f"{out}: 7 shards, all whole\n"
        assert hub.most_at_once >= 3
        assert sorted(hub.gets) == sorted(NAMES)
        assert shards_in(out) == FILES and names_in(out) == sorted(NAMES)
    again = run(SCRIPT, 6, "--out", out, **environment)  # the hub is gone
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_only_the_first_shards_and_only_the_missing_ones(tmp_path: Path, environment: dict[str, str]) -> None:
    with StandInHub(REPOSITORY, FILES) as hub:
        environment["HF_ENDPOINT"] = hub.url
        assert run(SCRIPT, 1, "--out", tmp_path / "o", **environment).returncode == 0
        assert names_in(tmp_path / "o") == [NAMES[1], NAMES[0]]
        (tmp_path / "o" / NAMES[1]).write_bytes(FILES[NAMES[1]][:-2])  # damaged: fetched anew
        hub.gets.clear()
        assert run(SCRIPT, 2, "--out", tmp_path / "o", **environment).returncode == 0
        assert sorted(hub.gets) == [NAMES[1], NAMES[2]]
        assert shards_in(tmp_path / "o") == {name: FILES[name] for name in NAMES[:3]}


def test_a_bad_transfer_is_made_good(tmp_path: Path, environment: dict[str, str]) -> None:
    faults = {NAMES[1]: ["short"], NAMES[2]: ["garbage"], NAMES[3]: ["cut"], NAMES[0]: ["slow"]}
    with StandInHub(REPOSITORY, FILES, faults) as hub:
        result = run(SCRIPT, 3, "--out", tmp_path / "o", **environment | {"HF_ENDPOINT": hub.url})
        assert result.returncode == 0, result.stderr
        assert shards_in(tmp_path / "o") == {name: FILES[name] for name in NAMES[:4]}
        assert sorted(hub.gets) == sorted([NAMES[0]] + 2 * NAMES[1:4])


def test_missing_and_truncated_files_are_named_and_the_rest_is_kept(tmp_path: Path,
                                                                    environment: dict[str, str]) -> None:
    files = {name: content for name, content in FILES.items() if name != NAMES[4]}
    files[NAMES[2]] = files[NAMES[2]][:-1000]  # truncated on the hub itself
    with StandInHub(REPOSITORY, files) as hub:
        result = run(SCRIPT, 6, "--out", tmp_path / "o", **environment | {"HF_ENDPOINT": hub.url})
        assert_user_error(result, "2 of 7 shards", NAMES[2],
                          "40026 bytes, but the header counts 20001 tokens",
                          f"{NAMES[4]}: the dataset {REPOSITORY} has no such file")
        assert hub.gets.count(NAMES[2]) == 2  # once more, then named
        assert names_in(tmp_path / "o") == sorted(set(NAMES) - {NAMES[2], NAMES[4]})


def test_a_dead_source_says_what_can_serve_instead(tmp_path: Path, environment: dict[str, str]) -> None:
    result = run(SCRIPT, "--out", tmp_path / "o", **environment)
    assert_user_error(result, "http://127.0.0.1:9 could not serve 31 shards", NAMES[0], "27 more",
                      "HF_ENDPOINT",
                      "HF_HUB_OFFLINE", "--from DIR")
    offline = run(SCRIPT, 1, "--out", tmp_path / "o", **environment | {"HF_HUB_OFFLINE": "1"})
    assert_user_error(offline, "could not serve 2 shards", "offline mode", "--from DIR")
    assert names_in(tmp_path / "o") == []


def test_a_hub_that_fails_is_no_traceback(tmp_path: Path, environment: dict[str, str]) -> None:
    faults = {NAMES[0]: ["down"] * 50, NAMES[1]: ["broken"], NAMES[2]: ["broken"] * 50}
    with StandInHub(REPOSITORY, FILES, faults) as hub:
        environment["HF_ENDPOINT"] = hub.url
        result = run(SCRIPT, 1, "--out", tmp_path / "o", **environment)
        assert_user_error(result, "could not serve 2 shards", "500", "--from DIR")
        assert names_in(tmp_path / "o") == [] and hub.gets == []
        del hub.faults[NAMES[0]]
        result = run(SCRIPT, 2, "--out", tmp_path / "o", **environment)
        assert_user_error(result, "1 of 3 shards", NAMES[2], "500")
        assert names_in(tmp_path / "o") == [NAMES[1], NAMES[0]]


def test_the_hubs_cache_serves_without_network(tmp_path: Path, environment: dict[str, str]) -> None:
    code = ("from huggingface_hub import hf_hub_download\n"
            f"for name in {NAMES[:2]}: hf_hub_download({REPOSITORY!r}, name, repo_type='dataset')")
    with StandInHub(REPOSITORY, FILES) as hub:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True,
                       env=os.environ | environment | {"HF_ENDPOINT": hub.url})
    result = run(SCRIPT, 1, "--out", tmp_path / "o", **environment | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    assert shards_in(tmp_path / "o") == {name: FILES[name] for name in NAMES[:2]}
    assert not any(path.is_symlink() for path in (tmp_path / "o").iterdir())  # the cache may be cleared


def test_a_mirror_folder(tmp_path: Path, environment: dict[str, str]) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name in NAMES[:4]:
        (mirror / name).write_bytes(FILES[name])
    result = run(SCRIPT, 3, "--from", mirror, "--out", tmp_path / "o", **environment)
    assert result.returncode == 0, result.stderr
    assert shards_in(tmp_path / "o") == shards_in(mirror)
    (mirror / NAMES[1]).write_bytes(FILES[NAMES[1]][:2000])
    (mirror / NAMES[2]).unlink()
    result = run(SCRIPT, 3, "--from", mirror, "--out", tmp_path / "o2", **environment)
    assert_user_error(result, "2 of 4 shards", f"{NAMES[1]}: damaged", f"{mirror / NAMES[2]}: No such file")
    assert names_in(tmp_path / "o2") == [NAMES[3], NAMES[0]]
    assert_user_error(run(SCRIPT, 3, "--from", tmp_path / "no", "--out", tmp_path / "o2"), tmp_path / "no",
                      "--from")


def test_check_only_looks(tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "o"
    assert_user_error(run(SCRIPT, 2, "--check", "--out", out, **environment), out, "3 of 3 shards", "missing",
                      NAMES[0])
    assert not out.exists()
    out.mkdir()
    for name in NAMES[:3]:
        (out / name).write_bytes(FILES[name])
    result = run(SCRIPT, 2, "--check", "--out", out, **environment)
    assert (result.returncode, result.stdout) == (0, f"{out}: 3 shards, all whole\n")
    (out / NAMES[2]).write_bytes(FILES[NAMES[2]] + b"\0")
    result = run(SCRIPT, 2, "--check", "--out", out, **environment)
    assert_user_error(result, "1 of 3 shards", out / NAMES[2], "41027 bytes")
    assert (out / NAMES[2]).read_bytes() == FILES[NAMES[2]] + b"\0"


@pytest.mark.parametrize("arguments, part", [
    (["0"], "N is 0"), (["104"], "N is 104, but the dataset has train shards 1 to 103"), (["-3"], "-3"),
    (["ten"], "ten"), (["1", "--check", "--from", "x"], "--from"), (["--nonsense"], "--nonsense"),
    (["--out", ""], "an empty path"),
])
def test_wrong_arguments(arguments: list[str], part: str) -> None:
    assert_user_error(run(SCRIPT, *arguments), part, code=2)


def test_what_stands_in_the_way_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert_user_error(run(SCRIPT, 1, "--out", tmp_path / "file", **environment), tmp_path / "file", "--out")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "o" / NAMES[0]).mkdir(parents=True)
    assert_user_error(run(SCRIPT, 1, "--out", tmp_path / "o", **environment), tmp_path / "o" / NAMES[0],
                      "no file")
    with shards.lock_folder(tmp_path):
        assert_user_error(run(SCRIPT, 1, "--out", tmp_path, **environment), tmp_path, "another data script")


def test_too_small_a_disk_is_said_before_the_first_byte(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=31 * 200_001_024 - 1))
    monkeypatch.setattr(cached_fineweb10B, "fetch_all", lambda *arguments: pytest.fail("fetched"))
    monkeypatch.setattr(sys, "argv", [SCRIPT, "30", "--out", str(tmp_path / "o")])
    with pytest.raises(shards.DataError, match="31 shards of about 200 MB take 6.2 GB, but 6.2 GB are free"):
        cached_fineweb10B.main()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=31 * 200_001_024))
    cached_fineweb10B.check_space(tmp_path, 31)  # exactly enough passes


@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_interrupted_it_leaves_no_half_file_and_carries_on(how: signal.Signals, code: int, tmp_path: Path,
                                                           environment: dict[str, str]) -> None:
    out = tmp_path / "o"
    faults = {name: ["slow"] * 9 for name in NAMES[1:]}
    with StandInHub(REPOSITORY, FILES, faults, slow=20.0) as hub:
        environment["HF_ENDPOINT"] = hub.url
        process = subprocess.Popen([sys.executable, str(DATA / SCRIPT), "3", "--out", str(out)],
                                   stderr=subprocess.PIPE, encoding="utf-8", env=os.environ | environment)
        deadline = time.monotonic() + 30
        while not ((out / NAMES[0]).exists() and len(set(hub.gets)) == 4):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(how)
        _, stderr = process.communicate(timeout=5)  # it does not wait for the 20 seconds
        assert process.returncode == code and "Traceback" not in stderr
        assert shards_in(out) == {NAMES[0]: FILES[NAMES[0]]}
        hub.faults.clear()
        hub.gets.clear()
        assert run(SCRIPT, 3, "--out", out, **environment).returncode == 0
        assert sorted(hub.gets) == NAMES[1:4]
        assert names_in(out) == sorted(NAMES[:4])
        assert shards_in(out) == {name: FILES[name] for name in NAMES[:4]}
