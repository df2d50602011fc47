"""SIGINT and SIGTERM: the step is finished, saved, said; 130 and 143; on all ranks; a second signal ends the run at once."""
from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from fault_helpers import body, checkpoints, logs, make_shards, succeed, val_losses, wait_for, words
from train_helpers import descendants, finish_ranks, launch, start_ranks

@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), sequences=2)


def endless(shards: Path, log_dir: Path, **fields: object) -> list[str]:
    return words(shards, log_dir, num_iterations=200, val_loss_every=0, **fields)


def last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]


def in_training(log_dir: Path, step: int = 2) -> bool:
    return any(re.search(rf"^step:{step}/", body(log), re.MULTILINE) for log in logs(log_dir))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_resume(signum: int, shards: Path, tmp_path: Path) -> None:
    run_words = endless(shards, tmp_path / "logs", save_every=150)
    ranks = start_ranks(run_words, 1, tmp_path)
    wait_for(lambda: in_training(tmp_path / "logs"))
    start = time.monotonic()
    os.kill(ranks[0].pid, signum)
    finish_ranks(ranks)
    assert ranks[0].exitcode == 128 + signum and time.monotonic() - start < 20
    log = logs(tmp_path / "logs")[0]
    (step, folder), = checkpoints(tmp_path / "logs").items()
    assert f"step:{step}/200 train_time" in body(log) and f"step:{step + 1}/200" not in body(log)
    assert last_line(log).startswith(f"interrupted at step {step}: ") and "--resume auto" in last_line(log)
    assert f"{folder.parent.name}/{folder.name}" in last_line(log)
    assert f"interrupted at step {step}: " in (tmp_path / "stdout.0").read_text() and not (tmp_path / "stderr.0").read_text()
    if signum == signal.SIGTERM:  # what the line says works
        result = succeed([*endless(shards, tmp_path / "logs", save_every=150), "--resume", "auto",
                          "--dry_run"])
        assert result.returncode == 0


def test_without_saving_a_signal_says_that_nothing_was_saved(shards: Path, tmp_path: Path) -> None:
    ranks = start_ranks(endless(shards, tmp_path / "logs"), 1, tmp_path)
    wait_for(lambda: in_training(tmp_path / "logs"))
    os.kill(ranks[0].pid, signal.SIGINT)
    finish_ranks(ranks)
    assert ranks[0].exitcode == 130 and not checkpoints(tmp_path / "logs")
    assert re.match(r"interrupted at step \d+: nothing was saved, see --save_every", last_line(logs(tmp_path / "logs")[0]))


def test_a_signal_to_one_rank_stops_all_after_the_same_step(shards: Path, tmp_path: Path) -> None:
    run_words = endless(shards, tmp_path / "logs", batch_sequences=2, val_tokens=256, save_final=True)
    ranks = start_ranks(run_words, 2, tmp_path)
    wait_for(lambda: in_training(tmp_path / "logs"))
    os.kill(ranks[1].pid, signal.SIGTERM)  # not the rank that logs
    finish_ranks(ranks)
    assert [r.exitcode for r in ranks] == [143, 143]
    (step, folder), = checkpoints(tmp_path / "logs").items()
    assert sorted(p.name for p in folder.iterdir()) == ["muon_0.pt", "muon_1.pt", "shared.pt"]
    assert last_line(logs(tmp_path / "logs")[0]).startswith(f"interrupted at step {step}: ")


def test_a_second_signal_ends_the_run_at_once(shards: Path, tmp_path: Path) -> None:
    # the step never ends: the first signal waits for it, the second does not. sleep is C code that no Python handler cuts short
    patch = "import time\nt.train_step = lambda *a: time.sleep(600)"
    ranks = start_ranks(endless(shards, tmp_path / "logs", save_every=1), 1, tmp_path, patch=patch)
    wait_for(lambda: in_training_section(tmp_path / "logs"))
    os.kill(ranks[0].pid, signal.SIGINT)
    time.sleep(1.2)
    assert ranks[0].exitcode is None
    start = time.monotonic()
    os.kill(ranks[0].pid, signal.SIGTERM)
    finish_ranks(ranks)
    assert ranks[0].exitcode == 143 and time.monotonic() - start < 5
    assert "interrupted at step 0 by SIGTERM, a second time, without saving" in last_line(logs(tmp_path / "logs")[0])


def in_training_section(log_dir: Path) -> bool:
    """The header is whole and half a second has passed, so that the loop runs."""
    if not (logs(log_dir) and logs(log_dir)[0].read_text().count("=" * 100 + "\n") >= 2 and logs(log_dir)[0].read_text().endswith(
            "=" * 100 + "\n")):
        return False
    time.sleep(0.5)
    return True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_warm_up_ends_the_run_at_once(signum: int, shards: Path, tmp_path: Path) -> None:
    patch = "import time\nt.warm_up = lambda *a: time.sleep(600)"
    ranks = start_ranks(endless(shards, tmp_path / "logs", save_every=1), 1, tmp_path, patch=patch)
    wait_for(lambda: in_training_section(tmp_path / "logs"))
    start = time.monotonic()
    os.kill(ranks[0].pid, signum)
    finish_ranks(ranks)
    assert ranks[0].exitcode == 128 + signum and time.monotonic() - start < 5
    assert f"interrupted at step 0 by {signal.Signals(signum).name}, before training began" in last_line(logs(tmp_path / "logs")[0])


def test_a_step_that_outlives_the_grace_is_reported(shards: Path, tmp_path: Path) -> None:
    patch = "import time\nt.STOP_GRACE = 2\nt.train_step = lambda *a: time.sleep(600)"
    ranks = start_ranks(endless(shards, tmp_path / "logs", save_every=1), 1, tmp_path, patch=patch)
    wait_for(lambda: in_training_section(tmp_path / "logs"))
    os.kill(ranks[0].pid, signal.SIGTERM)
    finish_ranks(ranks, 15)
    assert ranks[0].exitcode == 143
    assert re.match(r"failed: step 0 did not end 2 s after SIGTERM: rank 0 is in train, line \d+", last_line(logs(tmp_path / "logs")[0]))


def test_a_signal_in_the_last_step_changes_nothing(shards: Path, tmp_path: Path) -> None:
    patch = ("real = t.validate\n"
             "def validate(training, step, *rest):\n"
             "    if step == 3: os.kill(os.getpid(), 15)\n"
             "    return real(training, step, *rest)\n"
             "t.validate = validate")
    succeed(words(shards, tmp_path, num_iterations=3, save_final=True), patch=patch)
    assert sorted(val_losses(logs(tmp_path)[0])) == [0, 1, 2, 3] and sorted(checkpoints(tmp_path)) == [3]


def test_a_signal_to_the_launcher_stops_all_ranks(shards: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupt() -> None:
        wait_for(lambda: in_training(tmp_path / "logs"))
        launcher, = [p for p in descendants(os.getpid()) if b"torch.distributed.run" in Path(f"/proc/{p}/cmdline").read_bytes()
                     and f"{tmp_path}".encode() in Path(f"/proc/{p}/cmdline").read_bytes()]
        seen.extend(descendants(launcher))
        os.kill(launcher, signal.SIGINT)

    result = launch(endless(shards, tmp_path / "logs", batch_sequences=2, val_tokens=256, save_every=150), 2,
                    while_running=interrupt)
    assert result.returncode != 0 and result.seconds < 55
    (step, _), = checkpoints(tmp_path / "logs").items()
    assert last_line(logs(tmp_path / "logs")[0]).startswith(f"interrupted at step {step}: ")
    assert len(seen) == 3 and not any(Path(f"/proc/{p}").exists() for p in seen)


def test_ranks_outlive_no_launcher(shards: Path, tmp_path: Path) -> None:
    """torchrun killed by SIGKILL: its ranks save and end, instead of holding the GPUs for the rest of the run."""
    ranks: list[int] = []

    def kill() -> None:
        wait_for(lambda: in_training(tmp_path / "logs"))
        launcher, = [p for p in descendants(os.getpid()) if b"torch.distributed.run" in Path(f"/proc/{p}/cmdline").read_bytes()
                     and f"{tmp_path}".encode() in Path(f"/proc/{p}/cmdline").read_bytes()]
        ranks.extend(descendants(launcher)[1:])
        os.kill(launcher, signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in ranks), 25)

    launch(endless(shards, tmp_path / "logs", batch_sequences=2, val_tokens=256, save_every=150), 2, while_running=kill)
    assert len(ranks) == 2 and len(checkpoints(tmp_path / "logs")) == 1
    assert last_line(logs(tmp_path / "logs")[0]).startswith("interrupted at step ")
