"""The token shard format: its one writer and its one reader, for the scripts of this folder.

A shard is 256 little-endian int32 (20240520, 1, number of tokens, then zeros) followed by that many
little-endian uint16 tokens and nothing else; each document in it starts with an end-of-text token. The format
is the one of llm.c's data files and of the dataset kjj0/fineweb10B-gpt2. train_gpt_medium.py carries a reader
of its own, because a log that embeds it must be enough to rerun a run; tests/test_data_shards.py holds both
to one table of files.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_TOKENS = 2**31 - 1  # the count is an int32
TEMPORARY_SUFFIX = ".tmp"


class DataError(ValueError):
    """A mistake the user can put right. Its text names the path or value, the rule, and what to do."""


def shard_bytes(num_tokens: int) -> int:
    """Size in bytes of a shard of `num_tokens` tokens."""
    return HEADER_BYTES + 2 * num_tokens


def check_shard(path: str | os.PathLike[str]) -> int:
    """Number of tokens of the shard at `path`, from its header; the file has exactly the size that follows.

    Costs one stat and 1024 bytes, whatever the size. Raises DataError for a file that is not a whole shard
    and the OSError of the system for one that is missing or cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
        raise DataError(f"{path}: not a file, but a shard is one")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path}: {size} bytes, but a shard starts with a header of {HEADER_BYTES} bytes; "
                        "the file is cut: fetch or build it again")
    magic, version, num_tokens = (int(value) for value in np.frombuffer(header, dtype="<i4", count=3))
    if magic != MAGIC:
        raise DataError(f"{path}: magic number {magic}, but a token shard has {MAGIC}; "
                        "this is another kind of file")
    if version != VERSION:
        raise DataError(f"{path}: format version {version}, but only version {VERSION} is known")
    if num_tokens < 1:
        raise DataError(f"{path}: the header counts {num_tokens} tokens, but a shard has at least 1")
    if size != shard_bytes(num_tokens):
        raise DataError(f"{path}: {size} bytes, but the header counts {num_tokens} tokens and so "
                        f"{shard_bytes(num_tokens)} bytes; the file is damaged: fetch or build it again")
    return num_tokens


def read_shard(path: str | os.PathLike[str]) -> np.ndarray:
    """The tokens of a shard as a read-only, memory-mapped uint16 array of shape (tokens,).

    Raises what check_shard raises.
    """
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(check_shard(path),))


class ShardWriter:
    """Writes one shard piece by piece; its name appears only when commit() has put the whole file on disk.

    Until then the tokens go to a file beside it, named after the process and with a blank header: not even
    the leftover of a killed process reads as a shard. Used as a context manager, it removes that file unless
    commit() ran. Raises OSError when the folder cannot be written or the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_tokens = 0
        self._temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        self._file = open(self._temporary, "wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, tokens: np.ndarray) -> None:
        """Adds `tokens`, a uint16 array of shape (n,)."""
        assert tokens.dtype == np.uint16 and tokens.ndim == 1
        assert self.num_tokens + len(tokens) <= MAX_TOKENS
        with self._named_errors():
            self._file.write(tokens.astype("<u2", copy=False).data)
        self.num_tokens += len(tokens)

    def commit(self) -> None:
        """Writes the header, forces the file to disk and gives it its name."""
        assert self.num_tokens > 0
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = MAGIC, VERSION, self.num_tokens
        with self._named_errors():
            self._file.seek(0)
            self._file.write(header.data)
            self._file.flush()
            os.fsync(self._file.fileno())  # else a power cut could leave the new name on an empty file
            self._file.close()
            os.replace(self._temporary, self.path)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds the path to the error of a full disk, which the system reports without one."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Removes what commit() has not given its name; does nothing after commit()."""
        with contextlib.suppress(OSError):  # on a full disk, what is still buffered fails once more
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_shard(path: str | os.PathLike[str], tokens: np.ndarray) -> None:
    """Writes `tokens`, uint16 of shape (n,), n >= 1, as one shard; raises OSError like ShardWriter."""
    with ShardWriter(path) as writer:
        writer.append(tokens)
        writer.commit()


def make_folder(path: str | os.PathLike[str]) -> Path:
    """`path` as a folder that can be written, made when missing; raises DataError saying what is wrong."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DataError(f"{folder}: a file stands where the output folder should be; name another with "
                        "--out") from None
    except OSError as error:
        raise DataError(f"{folder}: the output folder cannot be made ({error.strerror}); name another with "
                        "--out") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"{folder}: no permission to write in the output folder; name another with --out")
    return folder


def path_argument(text: str) -> Path:
    """A type for argparse: a path, not the empty one that an unset shell variable gives."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process, so that two runs do not write, or clear away, each other's files.

    Raises DataError when another process holds it. The lock ends with the process, however that ends.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(f"{folder}: another data script is writing there; wait for it or name another "
                        "--out") from None
    except OSError:  # a network file system without locks: nothing to hold
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def short(error: BaseException) -> str:
    """The first line of an error's text, cut to 200 characters, or its kind when it has none."""
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run_script(main: Callable[[], int | None]) -> None:
    """Runs a script's `main` and exits with its code; 1, with a message, for a mistake; 130 when interrupted.

    SIGTERM counts as an interrupt, so that temporary files are removed then too. Text that the terminal's
    encoding lacks is escaped instead of ending the script.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _stop)
    try:
        code = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept; the same command carries on", file=sys.stderr)
        code = 130
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        code = 1
    sys.exit(code)
