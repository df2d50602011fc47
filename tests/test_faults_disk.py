"""A disk that is full, read-only or not there; a console that goes away; no HOME; the user's umask."""
from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fault_helpers import body, checkpoints, contents, differences, leftovers, logs, make_shards, succeed, val_losses, words
from train_helpers import SCRIPT, clean_environment, fork_ranks

# no file of this process may grow past the limit, as with a quota: writes fail with EFBIG
LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({0}, resource.RLIM_INFINITY))\n"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    log_dir = tmp_path_factory.mktemp("whole")
    succeed(words(shards, log_dir, save_final=True))
    return log_dir


def refused(run_words: list[str], *parts: object, **how: object) -> None:
    result = fork_ranks(run_words, **how)
    assert result.returncode == 1 and "Traceback" not in result.stderr and result.stderr.count("error: ") == 1, result.stderr
    assert all(str(part) in result.stderr for part in parts), result.stderr


def test_a_full_disk_loses_log_lines_but_no_training(shards: Path, whole: Path, tmp_path: Path) -> None:
    # full from step 3 to step 5: the log gets 10 bytes more and then none
    patch = LIMITED.format("resource.RLIM_INFINITY") + """
real = t.train_step
def train_step(training, batch, step, *rest):
    if step == 2:
        size = max(os.path.getsize(p) for p in __import__("glob").glob(LOGS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
    if step == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return real(training, batch, step, *rest)
t.train_step = train_step
""".replace("LOGS", repr(f"{tmp_path}/*/*.txt"))
    result = succeed(words(shards, tmp_path, save_final=True), patch=patch)
    assert result.stdout.count("WARNING: ") == 1 and "a line could not be written" in result.stdout
    lines = body(logs(tmp_path)[0]).splitlines()
    at = next(i for i, line in enumerate(lines) if "lines lost" in line)
    assert lines[at - 1].startswith("step:2/8 val_loss:") and lines[at] == "log: 6 lines lost before this one"
    assert lines[at + 1].startswith("step:6/8 train_time:")
    assert all(line.startswith(("step:", "checkpoint at step 8", "peak memory allocated: ", "log: ")) for line in lines)  # none torn
    assert val_losses(logs(tmp_path)[0]) == {s: v for s, v in val_losses(logs(whole)[0]).items() if s not in (3, 4, 5)}
    assert not differences(contents(checkpoints(whole)[8]), contents(checkpoints(tmp_path)[8]))


def test_a_full_disk_loses_checkpoints_but_no_training(shards: Path, whole: Path, tmp_path: Path) -> None:
    patch = LIMITED.format("resource.RLIM_INFINITY") + """
real = t.write_synced
def write_synced(value, path):
    full = "000003" in str(path) and path.name == "shared.pt" or "000005" in str(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    real(value, path)
t.write_synced = write_synced
"""
    result = succeed(words(shards, tmp_path, save_every=1, keep_checkpoints=99), patch=patch)
    assert sorted(checkpoints(tmp_path)) == [1, 2, 4, 6, 7, 8] and not leftovers(tmp_path)
    for text in (result.stdout, body(logs(tmp_path)[0])):
        assert text.count("WARNING: no checkpoint at step ") == 2
        assert "WARNING: no checkpoint at step 3 (" in text and "; training goes on" in text
    assert val_losses(logs(tmp_path)[0]) == val_losses(logs(whole)[0])


def test_a_failed_save_on_one_rank_is_a_failed_save(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, sequences=2)
    patch = """
if rank == 1:
    def write_synced(value, path): raise OSError(122, "Disk quota exceeded")
    t.write_synced = write_synced
"""
    result = succeed(words(shards, tmp_path / "logs", batch_sequences=2, val_tokens=256, num_iterations=2, save_every=1), 2, patch=patch)
    assert not checkpoints(tmp_path / "logs") and not leftovers(tmp_path / "logs")
    assert result.stdout.count("WARNING: no checkpoint at step ") == 2 and "rank 1: " in result.stdout
    assert "Disk quota exceeded" in body(logs(tmp_path / "logs")[0])


def test_an_interruption_whose_save_fails_names_the_checkpoint_that_is_there(shards: Path, tmp_path: Path) -> None:
    patch = """
real = t.write_synced
def write_synced(value, path):
    if "000002" not in str(path): raise OSError(28, "No space left on device")
    real(value, path)
t.write_synced = write_synced
step = t.train_step
def train_step(training, batch, n, *rest):
    if n == 4: os.kill(os.getpid(), 2)
    return step(training, batch, n, *rest)
t.train_step = train_step
"""
    assert fork_ranks(words(shards, tmp_path, save_every=2), patch=patch).returncode == 130
    assert logs(tmp_path)[0].read_text().splitlines()[-1].endswith("_checkpoints/step_000002")


def test_a_disk_that_is_full_at_the_start_is_said_before_anything_runs(shards: Path, tmp_path: Path) -> None:
    refused(words(shards, tmp_path / "logs"), "the run's log cannot be written there", "--log_dir", patch=LIMITED.format(50_000)
            + "def warm_up(*a): raise AssertionError('too late')\nt.warm_up = warm_up")
    assert not logs(tmp_path / "logs")


def test_a_log_folder_that_is_a_file(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    refused(words(shards, tmp_path / "logs"), f"{tmp_path / 'logs'}", "not a folder", "--log_dir names another")
    refused(words(shards, tmp_path / "logs" / "deeper"), "not a folder")
    refused(words(shards, "~nobody-of-this-name/logs"), "~nobody-of-this-name/logs: there is no such home folder")


def without_root_powers() -> None:
    """Root, too, is refused where the mode bits refuse it: CAP_DAC_OVERRIDE leaves at the next exec."""
    assert ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) == 0 or os.getuid() != 0  # PR_CAPBSET_DROP


def test_a_read_only_checkout(shards: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    checkout.chmod(0o555)
    try:
        def run(log_dir: str | Path) -> subprocess.CompletedProcess[str]:
            return subprocess.run([sys.executable, str(checkout / SCRIPT.name), *words(shards, log_dir, num_iterations=1)], text=True,
                                  capture_output=True, timeout=60, env=clean_environment(), preexec_fn=without_root_powers)
        inside, outside = run("records/rehearsal"), run(tmp_path / "logs")
    finally:
        checkout.chmod(0o755)
    assert inside.returncode == 1 and inside.stderr.startswith(f"error: {checkout}/records") and "not writable" in inside.stderr
    assert inside.stderr.count("\n") == 1
    assert outside.returncode == 0, outside.stderr
    assert len(logs(tmp_path / "logs")) == 1


def test_no_home_no_user_and_an_ascii_locale(tmp_path: Path) -> None:
    """Names that the locale cannot spell, in every path: shards, checkpoint, log."""
    folder = tmp_path / "Läufe – 350M"
    folder.mkdir()
    shards = make_shards(folder)
    spelled = [w.encode().decode("ascii", "surrogateescape") for w in words(  # as that locale spells the names
        shards, folder / "first", save_every=1, num_iterations=2, keep_checkpoints=9)]
    succeed(spelled)
    kept = {k: v for k, v in clean_environment().items() if k in ("PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")}
    run_words = words(shards, folder / "logs", num_iterations=2, save_final=True, resume=checkpoints(folder / "first")[1])
    result = subprocess.run([sys.executable, str(SCRIPT), *run_words], capture_output=True, timeout=60,
                            env={**kept, "LC_ALL": "C", "PYTHONUTF8": "0"})
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert sorted(val_losses(logs(folder / "logs")[0])) == [1, 2]
    assert not differences(contents(checkpoints(folder / "first")[2]), contents(checkpoints(folder / "logs")[2]))


def test_a_console_that_goes_away_ends_no_run(shards: Path, tmp_path: Path) -> None:
    patch = """
real = t.train_step
def train_step(training, batch, step, *rest):
    if step == 2: os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    if step == 4:
        r, w = os.pipe(); os.close(r); os.dup2(w, 1)
    return real(training, batch, step, *rest)
t.train_step = train_step
"""
    result = fork_ranks(words(shards, tmp_path), patch=patch)
    assert not result.stderr and sorted(val_losses(logs(tmp_path)[0])) == list(range(9))


@pytest.mark.parametrize("umask, mode", [(0o077, 0o600), (0o027, 0o640)])
def test_files_are_as_private_as_the_umask_says(umask: int, mode: int, shards: Path, tmp_path: Path) -> None:
    succeed(words(shards, tmp_path / "logs", num_iterations=1, save_final=True, val_loss_every=0), patch=f"os.umask({umask})")
    made = list((tmp_path / "logs").rglob("*"))
    assert len(made) >= 6  # run folder, log, folder of checkpoints, checkpoint, shared.pt, muon_0.pt
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (mode | (mode & 0o444) >> 2 if path.is_dir() else mode), path


def test_no_name_of_a_temporary_file_can_be_guessed(shards: Path, tmp_path: Path) -> None:
    """Two runs, all paths that they opened for writing: outside of their own folders none, and the ones aside differ."""
    def written(number: int) -> set[str]:
        patch = ("import sys\nout = open(%r, 'w')\n"
                 "sys.addaudithook(lambda event, args: event in ('open', 'os.mkdir') and (event == 'os.mkdir' or isinstance(args[2], int)"
                 " and args[2] & 3) and not isinstance(args[0], int) and out.write(f'{args[0]}\\n') and out.flush())"
                 % str(tmp_path / f"names{number}"))
        succeed(words(shards, tmp_path / f"logs{number}", num_iterations=2, save_every=1), patch=patch)
        return {line for line in (tmp_path / f"names{number}").read_text().splitlines() if "/.cache/" not in line}
    first, second = written(1), written(2)
    assert all(name.startswith(str(tmp_path)) for name in first | second), first | second
    aside = {Path(p).parts[-2] for p in first | second if "/.step_" in p and p.endswith(".pt")}
    assert len(aside) == 4 and all(len(name.rpartition(".")[2]) == 32 for name in aside)
