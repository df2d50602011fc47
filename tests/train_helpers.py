"""What the tests of train_gpt_medium.py share: tiny shards, launching the script, and ranks forked from one warm process.

A process that imports torch costs three seconds, so most runs here are forked from a server that has imported it already
and has done nothing else (`fork_ranks`); what must be the real thing goes through `launch`. Both give a Result.
"""
from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt_medium.py"
LIMIT = 60.0  # seconds: no run of these tests may take longer, faults included
SEPARATOR = "=" * 100


def shard(tokens: Sequence[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """The bytes of a shard, field by field; wrong ones too."""
    count = len(tokens) if count is None else count
    return struct.pack("<256i", magic, version, count, *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


def english(length: int, start: int = 0) -> list[int]:
    """Tokens 0..255 for the bytes of English that every Python carries, 256 in front of each document."""
    import pydoc_data.topics
    tokens: list[int] = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        tokens += [256, *text.encode("utf-8")]
    assert len(tokens) >= start + length
    return tokens[start: start + length]


@dataclasses.dataclass
class Result:
    returncodes: list[int]
    stdouts: list[str]
    stderrs: list[str]
    seconds: float
    log: Path | None = None  # the log that the run wrote, where it wrote exactly one

    @property
    def returncode(self) -> int:
        return max(self.returncodes, key=abs)

    @property
    def stdout(self) -> str:
        return self.stdouts[0]

    @property
    def stderr(self) -> str:
        return self.stderrs[0]

    def losses(self) -> dict[int, str]:
        """step -> val loss, as the log spells it."""
        return dict((int(s), loss) for s, loss in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", self.body(), re.MULTILINE))

    def parts(self) -> tuple[bytes, str, str]:
        """(source, header, body): the log cut at its two separators."""
        line = f"\n{SEPARATOR}\n".encode()
        raw = self.log.read_bytes()
        before, _, body = raw.rpartition(line)
        source, _, header = before.rpartition(line)
        return source + b"\n", header.decode("utf-8"), body.decode("utf-8")

    def header(self) -> dict[str, str]:
        return dict(line.split(": ", 1) for line in self.parts()[1].splitlines() if ": " in line)

    def body(self) -> str:
        return self.parts()[2]

    def hyperparameters(self) -> dict[str, typing.Any]:
        found = re.findall(r"^hyperparameter (\w+): (.*)$", self.parts()[1], re.MULTILINE)
        return {name: json.loads(text) for name, text in found}


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, without GPUs, one thread a rank."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", **more}


def only_log(words: Sequence[str], before: set[Path]) -> Path | None:
    words = [str(w) for w in words]
    if "--log_dir" not in words:
        return None
    new = sorted(set(Path(words[words.index("--log_dir") + 1]).glob("*/*.txt")) - before)
    return new[0] if len(new) == 1 else None


def existing_logs(words: Sequence[str]) -> set[Path]:
    words = [str(w) for w in words]
    return set(Path(words[words.index("--log_dir") + 1]).glob("*/*.txt")) if "--log_dir" in words else set()


def descendants(pid: int) -> list[int]:
    """A process and all below it: torchrun gives each rank a session of its own, so that its group does not hold them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for p in found:
        found += children.get(p, [])
    return found


def launch(words: Sequence[typing.Any], ranks: int | None = None, script: Path = SCRIPT, cwd: Path | None = None,
           while_running: typing.Callable[[], None] | None = None, limit: float = LIMIT, **environment: str) -> Result:
    """Run the script alone (ranks None) or through torch.distributed.run. Everything is killed after `limit` seconds."""
    words = [str(w) for w in words]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    before, start = existing_logs(words), time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen([sys.executable, *launcher, str(script), *words], stdout=out, stderr=err, cwd=cwd,
                                   stdin=subprocess.DEVNULL, env=clean_environment(**environment), start_new_session=True)
        try:
            if while_running is not None:
                while_running()
            process.wait(limit)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                for pid in descendants(process.pid):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    assert not timed_out, f"{words} ran past {limit:.0f} s:\n{texts[0]}\n{texts[1]}"
    return Result([process.returncode], texts[:1], texts[1:], time.monotonic() - start, only_log(words, before))


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def _rank(words: list[str] | None, rank: int, world: int, port: int, folder: str, patch: str, terminal: bool,
          function: str, arguments: tuple) -> None:
    """In a fresh fork: what a rank of torchrun sees, then main(words), or function(*arguments) of a test module."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        kind = _Terminal if terminal and number == 1 else io.TextIOWrapper
        setattr(sys, name, kind(os.fdopen(number, "wb", 0, closefd=False), encoding="utf-8", write_through=True))
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))
    import torch
    import train_gpt_medium as t
    torch.set_num_threads(1)
    sys.argv = [str(SCRIPT), *(words or [])]
    code = 0
    try:
        exec(patch, {"t": t, "torch": torch, "rank": rank, "os": os, "sys": sys})
        if words is not None:
            t.main(words)
        else:
            module, _, name = function.partition(":")
            result = getattr(__import__(module), name)(rank, world, *arguments)
            torch.save(result, f"{folder}/result.{rank}")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)  # no atexit handlers: a failed process group would wait in them


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


_context: typing.Any = None


def fork_context() -> typing.Any:
    """A server that has imported torch and the script and has run neither: forks of it start in milliseconds."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["train_helpers"])
        kept = dict(os.environ)
        os.environ.clear()
        os.environ.update(clean_environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), str(ROOT)]), TRAIN_HELPERS_WARM="1"))
        try:
            from multiprocessing import forkserver
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(kept)
    return _context


if os.environ.pop("TRAIN_HELPERS_WARM", ""):
    import torch._dynamo  # noqa: F401  (in the server only; the first optimizer imports it, 2.6 s)
    import train_gpt_medium  # noqa: F401


def start_ranks(words: Sequence[typing.Any] | None, world: int, folder: Path, patch: str = "", terminal: bool = False,
                function: str = "", arguments: tuple = (), words_of: dict[int, Sequence[typing.Any]] | None = None) -> list:
    port, processes = free_port(), []
    for rank in range(world):
        mine = (words_of or {}).get(rank, words)
        mine = None if mine is None else [str(w) for w in mine]
        processes.append(fork_context().Process(target=_rank, args=(mine, rank, world, port, str(folder), patch, terminal,
                                                                    function, arguments)))
        processes[-1].start()
    return processes


def finish_ranks(processes: list, limit: float = LIMIT) -> None:
    """Wait for all; kill all when one runs past the limit."""
    end = time.monotonic() + limit
    for process in processes:
        process.join(max(end - time.monotonic(), 0.01))
    late = [i for i, p in enumerate(processes) if p.exitcode is None]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    assert not late, f"ranks {late} ran past {limit:.0f} s"


def read_exactly(path: Path) -> str:
    """A file's text with its carriage returns; "" where there is none."""
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""


def fork_ranks(words: Sequence[typing.Any], world: int = 1, limit: float = LIMIT, **how: typing.Any) -> Result:
    """main(words) on `world` ranks. `patch` is Python that each rank runs first (names: t the script, torch, rank)."""
    before, start = existing_logs(words), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        processes = start_ranks(words, world, Path(folder), **how)
        try:
            finish_ranks(processes, limit)
        finally:
            texts = {name: [read_exactly(Path(folder) / f"{name}.{r}") for r in range(world)] for name in ("stdout", "stderr")}
            if any(p.exitcode is None or p.exitcode < 0 for p in processes):
                print(*texts["stdout"], *texts["stderr"], sep="\n")
    return Result([p.exitcode for p in processes], texts["stdout"], texts["stderr"], time.monotonic() - start,
                  only_log(words, before))


def call_on_ranks(function: str, world: int, *arguments: typing.Any, limit: float = LIMIT) -> list[typing.Any]:
    """function "module:name" as name(rank, world, *arguments) on each rank; the values, in rank order."""
    import torch
    with tempfile.TemporaryDirectory() as folder:
        processes = start_ranks(None, world, Path(folder), function=function, arguments=arguments)
        finish_ranks(processes, limit)
        errors = "".join((Path(folder) / f"stderr.{r}").read_text() for r in range(world))
        assert [p.exitcode for p in processes] == [0] * world, errors
        return [torch.load(f"{folder}/result.{r}", weights_only=False) for r in range(world)]
