"""Builds token shards from text with GPT-2's vocabulary, verifies shards, and shows what is in one.

    python data/fineweb.py [build] INPUT ... --out DIR    .parquet, .jsonl, .jsonl.gz, .txt, or folders
    python data/fineweb.py [build] --version 10B|100B     the FineWeb sample of that size, from the hub
    python data/fineweb.py verify PATTERN ...             format, token range, documents; batches in all
    python data/fineweb.py decode FILE --at N --length N  the text of a stretch of tokens

50256 starts each document; documents run across shards; shard 0 is for validation, the last one is short. The
same input gives the same bytes with any number of workers. An interrupted build carries on at the last
finished shard. A row of a parquet or jsonl file is one document, and so is a whole .txt file. Text that looks
like a special token is text. The vocabulary comes from --vocabulary FILE (tiktoken's format, as in
gpt2.tiktoken) or through tiktoken, which downloads it once and looks in TIKTOKEN_CACHE_DIR first.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import codecs
import collections
import dataclasses
import functools
import glob
import gzip
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from shards import (MAX_TOKENS, TEMPORARY_SUFFIX, DataError, ShardWriter, check_shard, lock_folder,
                    make_folder, path_argument, read_shard, run_script, short)

DEFAULT_SHARD_SIZE = 100_000_000  # tokens
FINEWEB = "HuggingFaceFW/fineweb"
FINEWEB_FOLDERS = {"10B": "sample/10BT", "100B": "sample/100BT"}
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".txt")
RECORD_BATCH = 8 * 65536  # tokens of one training step of the record
RECORD_STEPS = 5640
STATE = "fineweb_build.json"
NAMED_FAULTS = 20  # bad rows that the report names one by one

# ------------------------------------------------------------------------------------------------------------
# vocabulary

EOT_TOKEN = 50256
GPT2_RANKS = 50256  # mergeable tokens: 256 bytes and 50000 merges
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
KNOWN_IDS = {b"!": 0, b"\n": 198, b" ": 220, b" the": 262, b" world": 995, b"Hello": 15496, b" gazed": 50255}

Ranks = dict[bytes, int]


def read_ranks(path: Path | None) -> Ranks:
    """GPT-2's ranks from a file of lines `base64 rank`, or through tiktoken when `path` is None; both are
    checked.

    Raises DataError for a file or a cache that does not hold them, and when they cannot be downloaded.
    """
    if path is None:
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # of requests, of the cache folder, of its checksums
            raise DataError(
                "GPT-2's vocabulary is neither in tiktoken's cache nor to be had from the network "
                f"({short(error)}).\n"
                "Give a file with --vocabulary FILE (gpt2.tiktoken in tiktoken's format), or set\n"
                "TIKTOKEN_CACHE_DIR to a folder in which tiktoken cached `gpt2` on a machine with network."
            ) from None
        ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
        source = "tiktoken's gpt2"
        ranks.pop(b"<|endoftext|>", None)  # listed by tiktoken, but no mergeable token
    else:
        ranks, source = {}, str(path)
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise DataError(f"{path}: line {number} is not `base64 rank`, the format of "
                                "gpt2.tiktoken") from None
    if len(ranks) != GPT2_RANKS or set(ranks.values()) != set(range(GPT2_RANKS)):
        raise DataError(f"{source}: {len(ranks)} tokens, but GPT-2's vocabulary has {GPT2_RANKS}, ranked 0 "
                        f"to {GPT2_RANKS - 1}; this is another vocabulary or a cut file")
    for token, rank in KNOWN_IDS.items():
        if ranks.get(token) != rank:
            raise DataError(f"{source}: {token.decode()!r} has rank {ranks.get(token)}, but {rank} in "
                            "GPT-2's vocabulary; this is another vocabulary")
    return ranks


# ------------------------------------------------------------------------------------------------------------
# encoding: what a worker does

SEGMENT = 65536  # characters; a longer text is encoded in segments
# the characters that \s means to tiktoken (Unicode's White_Space); Python's \s has four more
SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
BREAK = re.compile(f"(?<=[^{SPACE}])(?=[{SPACE}])")
LAST_BREAK = re.compile(f"(?s:.+)(?<=[^{SPACE}])(?=[{SPACE}])")
SPACES = re.compile(f"[{SPACE}]+")


def segments(text: str, limit: int = SEGMENT) -> Iterator[str]:
    """Cuts `text` so that the encodings of the pieces, joined, are the encoding of the whole.

    GPT-2's pattern never matches across a change from another character to white space, and of white space
    before a word it takes all but the last character first. Cuts at these two places alone change nothing. A
    piece has at most `limit` characters unless there is no such place in it; white space longer than that is
    a piece of its own.
    """
    start = 0
    while len(text) - start > limit:
        if found := LAST_BREAK.match(text, start, start + limit + 1):
            end = found.end()
        elif (run := SPACES.match(text, start)) and run.end() - start > 1 and run.end() < len(text):
            end = run.end() - 1
        elif later := BREAK.search(text, start + 1):
            end = later.start()
        else:
            break
        yield text[start:end]
        start = end
    yield text[start:]


class Gpt2:
    """GPT-2's encoding, for texts of any length."""

    def __init__(self, ranks: Ranks) -> None:
        self._encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                           special_tokens={"<|endoftext|>": EOT_TOKEN})
        # what the pattern would match as one piece, without the pattern
        self._one_piece = tiktoken.Encoding("piece", pat_str="(?s:.+)", mergeable_ranks=ranks,
                                            special_tokens={})

    def encode(self, text: str, limit: int = SEGMENT) -> list[np.ndarray]:
        """The tokens of `text`, uint16 arrays of shape (n,) to be joined; special tokens in it are text."""
        pieces = []
        for piece in segments(text, limit):
            # on about a million spaces the pattern's (?!\S) exhausts tiktoken's stack, which ends in a panic
            spaces = len(piece) > limit and SPACES.fullmatch(piece)
            tokens = (self._one_piece if spaces else self._encoding).encode_ordinary(piece)
            pieces.append(np.array(tokens, dtype=np.uint16))
        return pieces

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; bytes that are cut off their character become U+FFFD."""
        return self._encoding.decode(tokens)


class Row(NamedTuple):
    """A document as its file gives it. `kind` says what `payload` is: 'text' is UTF-8 bytes, 'json' a line of
    jsonl, 'more' the next stretch of the document before it. A null is None. `place` names the row to the
    user."""

    place: str
    kind: str
    payload: bytes | None


class Encoded(NamedTuple):
    """What became of some rows: tokens, uint16 of shape (n,), counts, and (index, fault) of the bad rows."""

    tokens: np.ndarray
    documents: int
    text_bytes: int
    faults: list[tuple[int, str]]


class BadRow(ValueError):
    """A row that holds no document; its text says why."""


def row_text(kind: str, payload: bytes | None, field: str) -> str:
    """The text of one row; raises BadRow when there is none."""
    if payload is None:
        raise BadRow(f"null in {field!r}")
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 at byte {error.start}") from None
    if kind != "json":
        return text
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow("not JSON") from None
    if not isinstance(record, dict) or field not in record:
        raise BadRow(f"no {field!r}")
    text = record[field]
    if text is None:
        raise BadRow(f"null in {field!r}")
    if not isinstance(text, str):
        raise BadRow(f"{field!r} is no text")
    return text


def encode_rows(gpt2: Gpt2, rows: list[tuple[str, bytes | None]], field: str) -> Encoded:
    """Encodes rows, given as (kind, payload); the end-of-text token comes before each document."""
    pieces: list[np.ndarray] = []
    documents = text_bytes = 0
    faults: list[tuple[int, str]] = []
    start_of_document = np.array([EOT_TOKEN], dtype=np.uint16)
    for i, (kind, payload) in enumerate(rows):
        try:
            text = row_text(kind, payload, field)
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:  # JSON can spell half a surrogate pair
            faults.append((i, "not UTF-8: half a surrogate pair"))
            continue
        except BadRow as error:
            faults.append((i, str(error)))
            continue
        if kind != "more":
            documents += 1
            pieces.append(start_of_document)
        text_bytes += size
        pieces += gpt2.encode(text)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16)
    return Encoded(tokens, documents, text_bytes, faults)


_worker: dict[str, Gpt2] = {}  # of a worker process: its encoding, made once


def start_worker(ranks: Ranks) -> None:
    """Prepares a worker process, which must not outlive its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    _worker["gpt2"] = Gpt2(ranks)


def worker_encode(rows: list[tuple[str, bytes | None]], field: str) -> Encoded:
    """encode_rows in a worker process."""
    return encode_rows(_worker["gpt2"], rows, field)


# ------------------------------------------------------------------------------------------------------------
# inputs: files to rows, a bounded piece at a time

PARQUET_BATCH = 64  # rows
TEXT_BLOCK = 4 << 20  # bytes of a .txt file that are read at once


def read_parquet(path: Path, field: str) -> Iterator[Row]:
    """The rows of a parquet file, whose column `field` must hold text; raises DataError for another file."""
    import pyarrow
    import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise DataError(f"{path}: no column {field!r}, but {', '.join(schema.names) or 'none'}; "
                                "name the one that holds the text with --field")
            kind = schema.field(field).type
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary"):
                raise DataError(f"{path}: column {field!r} holds {kind}, not text; name the right one with "
                                "--field")
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_BATCH, columns=[field], use_threads=False):
                column = batch.column(0)
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                # bytes, so that text that is not UTF-8 is one bad row and not the end
                for payload in column.cast(pyarrow.large_binary()).to_pylist():
                    number += 1
                    yield Row(f"{path}: row {number}", "text", payload)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a whole parquet file ({short(error)}); fetch it again") from None


def read_jsonl(path: Path) -> Iterator[Row]:
    """The lines of a .jsonl or .jsonl.gz file that are not blank; raises DataError for a damaged .gz file."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield Row(f"{path}: line {number}", "json", line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({short(error)}); fetch it again") from None


def read_txt(path: Path, block: int = TEXT_BLOCK) -> Iterator[Row]:
    """The one document of a .txt file, in several rows when it is longer than `block` bytes."""
    place = str(path)
    if path.stat().st_size <= block:
        yield Row(place, "text", path.read_bytes().removeprefix(codecs.BOM_UTF8))
        return
    fault = utf8_fault(path, block)
    if fault is not None:
        yield Row(place, "text", fault)
        return
    kind, rest = "text", ""
    with open(path, encoding="utf-8-sig", newline="") as file:
        while piece := file.read(block):
            rest += piece
            found = LAST_BREAK.match(rest)
            if found:
                yield Row(place, kind, rest[:found.end()].encode("utf-8"))
                kind, rest = "more", rest[found.end():]
    yield Row(place, kind, rest.encode("utf-8"))


def utf8_fault(path: Path, block: int) -> bytes | None:
    """None for a file that is UTF-8 throughout, else bytes of it that are not, for a worker to report."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        while True:
            piece = file.read(block)
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                return error.object[error.start:]
            if not piece:
                return None


@dataclasses.dataclass(frozen=True)
class Source:
    """One input file: its name in messages, what tells it from another version of it, how to get at it."""

    name: str
    identity: list[str | int]
    fetch: Callable[[], Path]

    def rows(self, field: str) -> Iterator[Row]:
        path = self.fetch()
        if path.suffix == ".parquet":
            return read_parquet(path, field)
        return read_txt(path) if path.suffix == ".txt" else read_jsonl(path)


def local_sources(inputs: list[Path]) -> list[Source]:
    """The files that `inputs` name, those of a folder sorted; raises DataError for what is no input."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*")
                           if file.name.endswith(SUFFIXES) and file.is_file())
            if not found:
                raise DataError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
            files += found
        elif not path.exists():
            raise DataError(f"{path}: no such file or folder")
        elif not path.is_file() or not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: not an input; it must be a file ending in {', '.join(SUFFIXES)} or a "
                            "folder of them")
        else:
            files.append(path)
    sources = []
    for file in files:
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: no permission to read it")
        status = file.stat()
        sources.append(Source(str(file), [str(file.resolve()), status.st_size, status.st_mtime_ns],
                              functools.partial(Path, file)))
    return sources


class Ahead:
    """Fetches hub files one ahead of their use, so that encoding rarely waits for the network."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._results: dict[str, queue.SimpleQueue[Path | DataError]] = {}

    def _start(self, name: str) -> None:
        if name not in self._results:
            self._results[name] = queue.SimpleQueue()
            # a daemon thread: an interrupt must not wait for a file of 2 GB
            threading.Thread(target=self._fetch, args=(name, self._results[name]), daemon=True).start()

    @staticmethod
    def _fetch(name: str, result: queue.SimpleQueue[Path | DataError]) -> None:
        from huggingface_hub import hf_hub_download
        try:
            result.put(Path(hf_hub_download(FINEWEB, name, repo_type="dataset")))
        except Exception as error:  # of requests, httpx, hf_xet or the system
            result.put(hub_error(name, error))

    def get(self, name: str) -> Path:
        """The local path of `name`; raises DataError when it cannot be had."""
        self._start(name)
        result = self._results.pop(name).get()
        following = self._names[self._names.index(name) + 1:]
        if following:
            self._start(following[0])
        if isinstance(result, DataError):
            raise result
        return result


def hub_error(name: str, error: Exception) -> DataError:
    """What to tell the user when the hub did not serve `name`."""
    from huggingface_hub import constants
    return DataError(f"{constants.ENDPOINT} could not serve {name} of {FINEWEB}: "
                     f"{short(error.__cause__ or error)}\n"
                     "Set HF_ENDPOINT to a mirror of the hub, or give downloaded parquet files as INPUT.\n"
                     "What was fetched is kept; the same command carries on.")


def hub_sources(version: str) -> list[Source]:
    """The parquet files of a FineWeb sample on the hub; raises DataError when the hub does not answer."""
    from huggingface_hub import HfApi
    folder = FINEWEB_FOLDERS[version]
    try:
        tree = list(HfApi().list_repo_tree(FINEWEB, path_in_repo=folder, repo_type="dataset"))
    except Exception as error:  # of requests, httpx or the system
        raise hub_error(folder, error) from None
    sizes = {entry.path: entry.size for entry in tree if entry.path.endswith(".parquet")}
    if not sizes:
        raise hub_error(folder, FileNotFoundError("no parquet file is listed there"))
    names = sorted(sizes)
    ahead = Ahead(names)
    print(f"{FINEWEB} {folder}: {len(names)} files, {sum(sizes.values()) / 1e9:.1f} GB, into the hub's cache",
          file=sys.stderr)
    return [Source(name, [name, sizes[name]], functools.partial(ahead.get, name)) for name in names]


# ------------------------------------------------------------------------------------------------------------
# build

UNIT_BYTES = 1 << 20  # text that goes to a worker at once


def units(sources: Iterable[Source], field: str) -> Iterator[list[Row]]:
    """The rows of all sources in lists of about UNIT_BYTES; the same input always gives the same lists."""
    unit: list[Row] = []
    size = 0
    for source in sources:
        for row in source.rows(field):
            unit.append(row)
            size += len(row.payload or b"") + 64  # 64: many empty rows must not make an endless list
            if size >= UNIT_BYTES:
                yield unit
                unit, size = [], 0
    if unit:
        yield unit


def without_place(rows: list[Row]) -> list[tuple[str, bytes | None]]:
    return [(row.kind, row.payload) for row in rows]


def encode_units(todo: Iterable[list[Row]], ranks: Ranks, field: str,
                 workers: int) -> Iterator[tuple[list[Row], Encoded]]:
    """Encodes each list of rows and yields it with its result, in order, whatever the number of workers.

    One worker is this process. With more, only a few lists a worker are under way at any time, so that memory
    stays bounded. Raises DataError when a worker process dies.
    """
    if workers == 1:
        gpt2 = Gpt2(ranks)
        for rows in todo:
            yield rows, encode_rows(gpt2, without_place(rows), field)
        return
    # spawn: pyarrow and tqdm run threads here, and a forked child could inherit a lock that one of them holds
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (ranks,))
    under_way: collections.deque[tuple[list[Row], Future[Encoded]]] = collections.deque()
    try:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: workers leave Ctrl-C to us
        for _ in range(workers):
            pool.submit(os.getpid)  # starts the process
        signal.signal(signal.SIGINT, handler)
        for rows in todo:
            under_way.append((rows, pool.submit(worker_encode, without_place(rows), field)))
            if len(under_way) > 2 * workers:
                rows, future = under_way.popleft()
                yield rows, future.result()
        while under_way:
            rows, future = under_way.popleft()
            yield rows, future.result()
    except BrokenProcessPool:
        raise DataError("a worker process was killed, perhaps for lack of memory (try fewer --workers); "
                        "finished shards are kept, and the same command carries on") from None
    finally:
        pool.shutdown(cancel_futures=True)


@dataclasses.dataclass
class Progress:
    """How far a build has come: saved after each shard, so that the next run can carry on from there."""

    settings: dict[str, object]
    shards: int = 0  # finished
    unit: int = 0  # the list of rows in which the next shard starts
    skip: int = 0  # tokens of that list that are in finished shards
    documents: int = 0  # these four: before that list
    text_bytes: int = 0
    num_faults: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    tokens: int = 0  # in finished shards
    complete: bool = False

    def save(self, folder: Path) -> None:
        temporary = folder / (STATE + TEMPORARY_SUFFIX)
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / STATE)


def shard_path(folder: Path, index: int) -> Path:
    """Shard 0 is the validation shard."""
    return folder / f"fineweb_{'train' if index else 'val'}_{index:06d}.bin"


def load_progress(folder: Path, settings: dict[str, object]) -> Progress:
    """The state of the build in `folder`, a fresh one when there is none.

    Raises DataError when the folder holds shards of something else, or not the shards that its state lists.
    """
    advice = "give another --out, or remove them to build anew"
    try:
        progress = Progress(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        others = sorted(folder.glob("fineweb_*.bin"))
        if others:
            raise DataError(f"{folder}: {others[0].name} is there already and not from an unfinished build; "
                            f"{advice}")
        return Progress(settings)
    except (ValueError, TypeError):
        raise DataError(f"{folder / STATE}: not the state of a build; {advice}") from None
    changed = [key for key, value in settings.items() if progress.settings.get(key) != value]
    if changed:
        raise DataError(f"{folder}: holds the shards of another build (different: {', '.join(changed)}); "
                        f"{advice}")
    for index in range(progress.shards):
        try:
            check_shard(shard_path(folder, index))
        except FileNotFoundError:
            raise DataError(f"{shard_path(folder, index)}: the build made it, but it is gone; put it back, "
                            f"or remove {STATE} and the other shards to build anew") from None
    return progress


def build(sources: list[Source], out: Path, *, field: str, shard_size: int, ranks: Ranks, workers: int,
          strict: bool) -> str:
    """Writes the shards of `sources` into `out` and returns the report; see the top of this file for the
    rules.

    A build that was interrupted is carried on, a finished one only reported. Raises DataError for inputs,
    rows (`strict`) and output folders that will not do, OSError for a full disk.
    """
    from tqdm import tqdm
    folder = make_folder(out)
    vocabulary = hashlib.sha256(b"\n".join(sorted(ranks, key=ranks.__getitem__)))
    settings: dict[str, object] = {
        "inputs": [source.identity for source in sources], "field": field, "shard_size": shard_size,
        "vocabulary": vocabulary.hexdigest(), "unit_bytes": UNIT_BYTES, "text_block": TEXT_BLOCK}
    with lock_folder(folder):
        progress = load_progress(folder, settings)
        if progress.complete:
            return report(progress, folder, "built before")
        for leftover in folder.glob(f"fineweb_*.bin.*{TEMPORARY_SUFFIX}"):
            leftover.unlink()  # of a build that was killed
        if progress.shards:
            print(f"carrying on after {progress.shards} finished shards", file=sys.stderr)
        began, tokens_before = time.perf_counter(), progress.tokens
        writer: ShardWriter | None = None
        todo = itertools.islice(units(sources, field), progress.unit, None)
        results = encode_units(todo, ranks, field, workers)
        with tqdm(unit=" tokens", unit_scale=True, disable=None, initial=progress.tokens) as bar:
            try:
                for index, (rows, encoded) in enumerate(results, progress.unit):
                    faults = [f"{rows[i].place}: {fault}" for i, fault in encoded.faults]
                    if faults and strict:
                        raise DataError(f"{faults[0]}; stopped there because of --strict")
                    done = progress.skip if index == progress.unit else 0
                    bar.update(len(encoded.tokens) - done)
                    while done < len(encoded.tokens):
                        writer = writer or ShardWriter(shard_path(folder, progress.shards))
                        part = encoded.tokens[done:done + shard_size - writer.num_tokens]
                        writer.append(part)
                        done += len(part)
                        if writer.num_tokens == shard_size:
                            writer.commit()
                            progress.unit, progress.skip = index, done
                            progress.shards += 1
                            progress.tokens += writer.num_tokens
                            progress.save(folder)
                            speed = (progress.tokens - tokens_before) / (time.perf_counter() - began)
                            tqdm.write(f"{writer.path}: {shard_size} tokens; {speed / 1e6:.2f}M tokens/s",
                                       sys.stderr)
                            writer = None
                    progress.documents += encoded.documents
                    progress.text_bytes += encoded.text_bytes
                    progress.num_faults += len(faults)
                    progress.faults += faults[:NAMED_FAULTS - len(progress.faults)]
                if writer is not None:
                    writer.commit()
                    progress.shards += 1
                    progress.tokens += writer.num_tokens
            finally:
                if writer is not None:
                    writer.discard()
        if not progress.documents:
            raise DataError("no document in the inputs" + "".join(f"\n{fault}" for fault in progress.faults))
        progress.complete = True
        progress.save(folder)
    speed = (progress.tokens - tokens_before) / (time.perf_counter() - began)
    return report(progress, folder, f"{speed / 1e6:.2f}M tokens/s with {workers} worker{'s' * (workers > 1)}")


def report(progress: Progress, folder: Path, ending: str) -> str:
    """What a finished build holds, in one line, and the rows it left out, a line each."""
    lines = [f"{folder}: {progress.shards} shards, {progress.tokens} tokens, {progress.documents} documents, "
             f"{progress.text_bytes / progress.tokens:.3f} bytes a token; {ending}"]
    if progress.shards == 1:
        lines.append("all of it is the validation shard; a smaller --shard_size leaves something to train on")
    if progress.num_faults:
        lines.append(f"{progress.num_faults} bad rows left out:")
        lines += progress.faults
        if progress.num_faults > len(progress.faults):
            lines.append(f"and {progress.num_faults - len(progress.faults)} more")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# verify and decode

READ_BLOCK = 1 << 23  # tokens looked at at once


def find_shards(patterns: list[str]) -> list[Path]:
    """The files that `patterns` match, a folder meaning its .bin files; raises DataError if none is there."""
    found: list[Path] = []
    for pattern in patterns:
        in_folder = os.path.join(glob.escape(pattern), "*.bin")
        matches = sorted(glob.glob(in_folder if os.path.isdir(pattern) else pattern, recursive=True))
        if not matches:
            raise DataError(f"{pattern}: no shard matches")
        found += map(Path, matches)
    return list(dict.fromkeys(found))


def batches_in(num_tokens: int, batch_tokens: int) -> int:
    """How many batches the training stream takes from one shard.

    A batch at `pos` reads batch_tokens + 1 tokens, the last one only as a target, and the stream leaves a
    shard when pos + batch_tokens + 1 reaches its length.
    """
    return max((num_tokens - 2) // batch_tokens, 0)


def verify(patterns: list[str], batch_tokens: int, eot_token: int) -> None:
    """Prints a line a shard and the sums; raises DataError at the end when one is bad."""
    paths = find_shards(patterns)
    bad = 0
    total_tokens = total_documents = train_batches = train_shards = 0
    for path in paths:
        try:
            tokens = read_shard(path)
        except (DataError, OSError) as error:
            bad += 1
            print(f"BAD {error}")
            continue
        low, high, documents = 65535, 0, 0
        for start in range(0, len(tokens), READ_BLOCK):
            block = tokens[start:start + READ_BLOCK]
            low, high = min(low, int(block.min())), max(high, int(block.max()))
            documents += int(np.count_nonzero(block == eot_token))
        line = (f"{path}: format version 1, {len(tokens)} tokens, {path.stat().st_size} bytes, "
                f"ids {low} to {high}, {documents} documents")
        if high > EOT_TOKEN:
            bad += 1
            print(f"BAD {line}; but ids end at {EOT_TOKEN}")
            continue
        print(line)
        total_tokens += len(tokens)
        total_documents += documents
        if "_val_" not in path.name:  # training never reads those
            train_shards += 1
            train_batches += batches_in(len(tokens), batch_tokens)
    print(f"in all {len(paths) - bad} good shards, {total_tokens} tokens, {total_documents} documents")
    print(f"{train_shards} train shards give {train_batches} batches of {batch_tokens} tokens and so feed "
          f"{train_batches} steps; the record's run takes {RECORD_STEPS} of {RECORD_BATCH}")
    if bad:
        raise DataError(f"{bad} of {len(paths)} shards are bad; fetch or build them again")


def decode(path: Path, at: int, length: int, gpt2: Gpt2) -> str:
    """The text of `length` tokens from token `at` on, end-of-text tokens spelled out; raises DataError."""
    tokens = read_shard(path)
    if not 0 <= at < len(tokens):
        raise DataError(f"{path}: --at is {at}, but the shard has tokens 0 to {len(tokens) - 1}")
    if length < 1:
        raise DataError(f"--length is {length}, but at least 1 token can be shown")
    stretch = tokens[at:at + length].tolist()
    if max(stretch) > EOT_TOKEN:
        worst = max(stretch)
        raise DataError(f"{path}: token {worst} at {at + stretch.index(worst)}, but ids end at {EOT_TOKEN}")
    return gpt2.decode(stretch)


# ------------------------------------------------------------------------------------------------------------
# command line

COMMANDS = ("build", "verify", "decode")


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type for argparse: a whole number from `low` to `high`."""
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not from {low} to {high}")
        return value
    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    vocabulary = argparse.ArgumentParser(add_help=False)
    vocabulary.add_argument("--vocabulary", metavar="FILE", type=path_argument,
                            help="GPT-2's ranks in tiktoken's format (default: tiktoken's own, see above)")

    command = commands.add_parser("build", parents=[vocabulary],
                                  help="build shards (this word may be left out)")
    command.add_argument("inputs", metavar="INPUT", type=path_argument, nargs="*",
                         help=f"file ({', '.join(SUFFIXES)}) or folder")
    command.add_argument("--version", choices=sorted(FINEWEB_FOLDERS),
                         help="fetch this sample of FineWeb instead")
    command.add_argument("--out", metavar="DIR", type=path_argument,
                         help="output folder (with --version, default: fineweb<version> beside this script)")
    command.add_argument("--shard_size", metavar="N", type=whole_number(1, MAX_TOKENS),
                         default=DEFAULT_SHARD_SIZE, help="tokens a shard (default: %(default)s)")
    command.add_argument("--field", default="text",
                         help="parquet column or jsonl field of the text (default: %(default)s)")
    command.add_argument("--workers", metavar="N", type=whole_number(1, 1024), default=processors(),
                         help="processes that encode (default: all %(default)s processors)")
    command.add_argument("--strict", action="store_true",
                         help="stop at the first bad row instead of leaving it out")

    command = commands.add_parser("verify", help="check shards and count batches")
    command.add_argument("patterns", metavar="PATTERN", nargs="+",
                         help="files, patterns like 'data/x/*.bin', or folders")
    command.add_argument("--batch_tokens", metavar="N", type=whole_number(1, MAX_TOKENS),
                         default=RECORD_BATCH, help="tokens a step (default: the record's %(default)s)")
    command.add_argument("--eot_token", metavar="ID", type=whole_number(0, 65535), default=EOT_TOKEN,
                         help="the token that starts a document (default: %(default)s)")

    command = commands.add_parser("decode", parents=[vocabulary], help="print the text of tokens")
    command.add_argument("file", metavar="FILE", type=path_argument)
    command.add_argument("--at", metavar="N", type=int, default=0,
                         help="first token, counted from 0 (default: %(default)s)")
    command.add_argument("--length", metavar="N", type=int, default=256, help="tokens (default: %(default)s)")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments.insert(0, "build")
    args = parser.parse_args(arguments)
    if args.command == "verify":
        verify(args.patterns, args.batch_tokens, args.eot_token)
        return
    if args.command == "decode":
        check_shard(args.file)  # before a vocabulary is looked for
        print(decode(args.file, args.at, args.length, Gpt2(read_ranks(args.vocabulary))))
        return
    if bool(args.inputs) == bool(args.version):
        parser.error("give either INPUT files and folders, or --version")
    if args.inputs and not args.out:
        parser.error("give the folder for the shards: --out DIR")
    sources = local_sources(args.inputs) if args.inputs else hub_sources(args.version)
    out = args.out or Path(__file__).resolve().parent / f"fineweb{args.version}"
    print(build(sources, out, field=args.field, shard_size=args.shard_size, ranks=read_ranks(args.vocabulary),
                workers=args.workers, strict=args.strict))


if __name__ == "__main__":
    run_script(main)
