"""One rank raises, is killed or hangs: all end within step_timeout and about 30 s more, the cause is the last thing printed and in the log."""
from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from fault_helpers import body, logs, make_shards, wait_for, words
from train_helpers import descendants, finish_ranks, fork_ranks, launch, start_ranks

# rank 1 does it as step 3 begins
AT_STEP_3 = """
import time, signal
real = t.train_step
def train_step(training, batch, step, *rest):
    if rank == 1 and step == 3:
        {0}
    return real(training, batch, step, *rest)
t.train_step = train_step
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), sequences=2)


def pair(shards: Path, log_dir: Path, **fields: object) -> list[str]:
    return words(shards, log_dir, batch_sequences=2, val_tokens=256, num_iterations=200, val_loss_every=0, **fields)


def failed_line(log_dir: Path) -> str:
    last = body(logs(log_dir)[0]).splitlines()[-1]
    assert last.startswith("failed: ") and "interrupted" not in body(logs(log_dir)[0])
    return last


def test_a_rank_that_raises_is_named_on_the_log_and_the_console(shards: Path, tmp_path: Path) -> None:
    result = fork_ranks(pair(shards, tmp_path), 2, limit=40, patch=AT_STEP_3.format("raise KeyError('no such thing')"))
    assert result.returncodes == [1, 1]
    assert failed_line(tmp_path) == "failed: rank 1 failed at step 3: KeyError: 'no such thing'"
    assert result.stderrs[0].strip() == "error: rank 1 failed at step 3: KeyError: 'no such thing'"  # no traceback of a victim
    assert result.stderrs[1].count("Traceback") == 1


def test_a_rank_that_is_killed_is_named(shards: Path, tmp_path: Path) -> None:
    ranks = start_ranks(pair(shards, tmp_path / "logs"), 2, tmp_path, patch=AT_STEP_3.format("os.kill(os.getpid(), signal.SIGKILL)"))
    finish_ranks(ranks, 40)
    assert [r.exitcode for r in ranks] == [1, -9]
    assert re.search(r"failed: rank 0 failed at step \d: RuntimeError: .*; no word from rank 1: killed, or stuck", failed_line(
        tmp_path / "logs"))


def test_a_rank_that_is_stuck_is_named_with_its_line(shards: Path, tmp_path: Path) -> None:
    result = fork_ranks(pair(shards, tmp_path, step_timeout=4), 2, limit=30, patch=AT_STEP_3.format("time.sleep(600)"))
    assert result.returncodes == [1, 1] and result.seconds < 25
    line = failed_line(tmp_path)
    assert "has not ended after 4 s" in line and re.search(r"rank 1 is in train, line \d+", line), line
    assert re.search(r"rank 0 is in (agreed|train_step|step|start_reduction), line \d+", line), line


def test_a_rank_that_is_stopped_is_named(shards: Path, tmp_path: Path) -> None:
    """Stuck where no Python runs, not even the thread that watches."""
    ranks = start_ranks(pair(shards, tmp_path / "logs", step_timeout=4), 2, tmp_path)
    wait_for(lambda: logs(tmp_path / "logs") and "step:3/" in body(logs(tmp_path / "logs")[0]))
    os.kill(ranks[1].pid, signal.SIGSTOP)
    try:
        ranks[0].join(30)
        assert ranks[0].exitcode == 1
        assert "no word from rank 1: killed, or stuck" in failed_line(tmp_path / "logs")
    finally:
        ranks[1].kill()  # torchrun does, 30 s after its SIGTERM
        ranks[1].join()


def test_one_rank_alone_does_not_hang_either(shards: Path, tmp_path: Path) -> None:
    patch = "import time\nt.validate = lambda *a: time.sleep(600)"
    ranks = start_ranks(words(shards, tmp_path / "logs", step_timeout=3), 1, tmp_path, patch=patch)
    finish_ranks(ranks, 20)
    assert ranks[0].exitcode == 1
    assert re.match(r"failed: step 0 has not ended after 3 s: rank 0 is in train, line \d+", failed_line(tmp_path / "logs"))


def test_a_failure_in_the_warm_up_reaches_the_log(shards: Path, tmp_path: Path) -> None:
    patch = "if rank == 1:\n    def warm_up(*a): raise ValueError('cannot compile')\n    t.warm_up = warm_up"
    result = fork_ranks(pair(shards, tmp_path, warmup_steps=1), 2, limit=40, patch=patch)
    assert result.returncodes == [1, 1]
    assert failed_line(tmp_path) == "failed: rank 1 failed at step 0: ValueError: cannot compile"


def test_torchrun_prints_the_root_cause_last(shards: Path, tmp_path: Path) -> None:
    """Killed, through the real launcher, which tells the healthy rank to stop: the log must not call that an interruption."""
    def kill() -> None:
        wait_for(lambda: logs(tmp_path / "logs") and "step:2/" in body(logs(tmp_path / "logs")[0]))
        ranks = [p for p in descendants(os.getpid()) if f"{tmp_path}".encode() in Path(f"/proc/{p}/cmdline").read_bytes()
                 and b"torch.distributed.run" not in Path(f"/proc/{p}/cmdline").read_bytes()]
        second, = [p for p in ranks if b"RANK=1" in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")]
        os.kill(second, signal.SIGKILL)

    result = launch(pair(shards, tmp_path / "logs", save_every=500), 2, while_running=kill)
    assert result.returncode == 1 and result.seconds < 55
    root = result.stderr[result.stderr.index("Root Cause"):]
    assert "rank      : 1" in root and "SIGKILL" in root
    assert "no word from rank 1" in failed_line(tmp_path / "logs")


def test_torchrun_prints_the_traceback_of_the_rank_that_raised_last(shards: Path, tmp_path: Path) -> None:
    # the rank's data ends in the middle of the run: a token that the vocabulary does not hold, in rank 1's half of batch 4
    bad = make_shards(tmp_path, sequences=2)
    raw = bytearray((bad / "train_000001.bin").read_bytes())
    raw[1024 + 2 * (3 * 256 + 200): 1024 + 2 * (3 * 256 + 200) + 2] = (60_000).to_bytes(2, "little")
    (bad / "train_000001.bin").write_bytes(raw)
    result = launch(pair(bad, tmp_path / "logs"), 2)
    assert result.returncode == 1
    root = result.stderr[result.stderr.index("Root Cause"):]
    assert "rank      : 1" in root and "token id 60000" in root and "Traceback" not in root
    assert "rank 1 failed at step 2: " in failed_line(tmp_path / "logs") and "token id 60000" in failed_line(tmp_path / "logs")
