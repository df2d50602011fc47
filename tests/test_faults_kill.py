"""SIGKILL at any moment, then --resume auto: never a corrupt state, at most save_every steps lost, the same final loss."""
from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from fault_helpers import (body, checkpoints, contents, differences, leftovers, logs, make_shards, succeed, val_losses, wait_for,
                           words)
from train_helpers import finish_ranks, fork_ranks, start_ranks

STEPS, SAVE_EVERY = 40, 2
# ends the process in the middle of its n-th action on files: a write half done, before or after a sync, rename or deletion
KILL_AT_ACTION = """
import signal
actions = [{0}]
def die():
    actions[0] -= 1
    if actions[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
def wrapped(function):
    def call(*args, **kwargs):
        die()
        value = function(*args, **kwargs)
        die()
        return value
    return call
for module, name in ((t, "sync_folder"), (t.os, "fsync"), (t.os, "rename"), (t.os, "replace"), (t.os, "mkdir"), (t.os, "unlink")):
    setattr(module, name, wrapped(getattr(module, name)))
class Half:
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        self.file.write(bytes(data)[:len(data) // 2])
        self.file.flush()
        die()
        return len(data) // 2 + self.file.write(bytes(data)[len(data) // 2:])
real_save = t.torch.save
t.torch.save = lambda value, f: real_save(value, Half(f))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    log_dir = tmp_path_factory.mktemp("whole")
    succeed(words(shards, log_dir, num_iterations=STEPS, save_final=True, val_loss_every=10))
    return log_dir


def steps_logged(log_dir: Path) -> int:
    """The last step that any log has."""
    return max((int(s) for log in logs(log_dir) for s in re.findall(r"^step:(\d+)/", body(log), re.MULTILINE)), default=0)


def test_twenty_kills_lose_at_most_save_every_steps(shards: Path, whole: Path, tmp_path: Path) -> None:
    run_words = words(shards, tmp_path / "logs", num_iterations=STEPS, save_every=SAVE_EVERY, val_loss_every=10, resume="auto")
    draw = random.Random(2920)
    done = killed = writing = 0
    for kill in range(200):
        (tmp_path / str(kill)).mkdir()
        if kill % 2:  # an action on files of the second to fourth save from here, or of clearing what the last kill left
            ranks = start_ranks(run_words, 1, tmp_path / str(kill), patch=KILL_AT_ACTION.format(draw.randrange(1, 60)))
        else:
            ranks = start_ranks(run_words, 1, tmp_path / str(kill))
            before = len(logs(tmp_path / "logs"))
            wait_for(lambda: len(logs(tmp_path / "logs")) > before or ranks[0].exitcode is not None)
            time.sleep(draw.uniform(0, 0.5))
            ranks[0].kill()
        finish_ranks(ranks)
        if ranks[0].exitcode == 0:
            break
        assert ranks[0].exitcode == -9, (tmp_path / str(kill) / "stderr.0").read_text()
        killed += 1
        writing += bool(leftovers(tmp_path / "logs"))
        if logs(tmp_path / "logs") and (found := re.search(r"^resumed from: (?:.* at step (\d+)|nothing)", (
                tmp_path / str(kill) / "stdout.0").read_text(), re.MULTILINE)):
            assert int(found[1] or 0) >= done - SAVE_EVERY, (kill, found[0], done)
        done = max(done, steps_logged(tmp_path / "logs"))
        for checkpoint in checkpoints(tmp_path / "logs").values():  # what is visible is whole
            contents(checkpoint)
        assert len(checkpoints(tmp_path / "logs")) <= 3  # the two that are kept, and one that a kill kept from deletion
        if killed >= 20:
            break
    assert killed >= 20 and writing >= 3, (killed, writing)
    succeed([*run_words, "--save_final", "true"])
    assert val_losses(logs(tmp_path / "logs")[-1])[STEPS] == val_losses(logs(whole)[0])[STEPS]
    assert not differences({**contents(checkpoints(whole)[STEPS]), "val_losses": 0},
                           {**contents(checkpoints(tmp_path / "logs")[STEPS]), "val_losses": 0})
    assert contents(checkpoints(tmp_path / "logs")[STEPS])["val_losses"] == contents(checkpoints(whole)[STEPS])["val_losses"]
    assert not leftovers(tmp_path / "logs") and len(checkpoints(tmp_path / "logs")) == 2


def test_a_kill_between_rename_and_deletion_leaves_whole_checkpoints(shards: Path, tmp_path: Path) -> None:
    patch = "t.os.replace = lambda *names: os.kill(os.getpid(), 9)"  # the deletion's first act
    assert fork_ranks(words(shards, tmp_path, save_every=1, keep_checkpoints=1), patch=patch).returncode == -9
    assert sorted(checkpoints(tmp_path)) == [1, 2]
    succeed(words(shards, tmp_path, save_every=1, keep_checkpoints=1, num_iterations=8, resume="auto"))
    assert sorted(checkpoints(tmp_path)) == [8]  # also what the kill had kept from deletion
