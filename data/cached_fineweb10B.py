"""Fetches FineWeb as GPT-2 tokens: the validation shard and the first N train shards of kjj0/fineweb10B-gpt2.

    python data/cached_fineweb10B.py [N]             N train shards, 1 to 103; default 30: the record's run
    python data/cached_fineweb10B.py [N] --check     only look: is all there and whole? no network
    python data/cached_fineweb10B.py [N] --from DIR  copy from a folder that holds the .bin files

A shard is about 200 MB. Each is fetched beside its place, verified (header, exact size) and only then given
its name; one that is there and whole is never fetched again, so an interrupted download carries on where it
was. When all is there the script says nothing. Through huggingface_hub, and so with its variables:
HF_ENDPOINT for a mirror of the hub, HF_HUB_OFFLINE=1 for what its cache already holds, HF_TOKEN, and the
usual proxy variables.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from shards import (DataError, check_shard, lock_folder, make_folder, path_argument, run_script, shard_bytes,
                    short)

REPOSITORY = "kjj0/fineweb10B-gpt2"
DEFAULT_OUT = Path(__file__).resolve().parent / "fineweb10B"
DEFAULT_TRAIN_SHARDS = 30
MAX_TRAIN_SHARDS = 103
SHARD_BYTES = shard_bytes(100_000_000)  # of all but the last train shard, which is shorter
PARALLEL_FETCHES = 8
MISSING = "missing"
STAGING = ".fetching"  # in the output folder, so that the last step is a rename on one file system


class Unreachable(Exception):
    """The source as a whole does not answer, so asking it for the other shards is useless."""


def shard_names(num_train: int) -> list[str]:
    """File names of the validation shard and of `num_train` train shards."""
    return ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, num_train + 1))]


def faults(folder: Path, names: list[str]) -> dict[str, str]:
    """What is wrong with each of `names` in `folder`; the shards that are whole are left out."""
    found = {}
    for name in names:
        try:
            check_shard(folder / name)
        except FileNotFoundError:
            found[name] = MISSING
        except (DataError, OSError) as error:
            found[name] = str(error)
    return found


def copy_from(mirror: Path, name: str, staging: Path) -> None:
    """Copies one shard of the folder `mirror` into `staging`; raises DataError when it is not there."""
    try:
        shutil.copyfile(mirror / name, staging / name)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DataError(f"{mirror / name}: {error.strerror}") from None


def cached_by_hub(name: str) -> Path | None:
    """Where the hub's client keeps a whole copy of `name` on this machine, if it does."""
    from huggingface_hub import try_to_load_from_cache
    path = try_to_load_from_cache(REPOSITORY, name, repo_type="dataset")
    return Path(path) if isinstance(path, str) and not faults(Path(path).parent, [name]) else None


def ask_hub(names: list[str]) -> None:
    """Raises Unreachable unless the hub answers, or need not be asked because its cache holds all of `names`.

    Asked here once, because the hub's client tries a dead network for half a minute before it says so.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import EntryNotFoundError
    name = next((name for name in names if not cached_by_hub(name)), None)
    if name is None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(REPOSITORY, name, repo_type="dataset"))
    except EntryNotFoundError:  # an answer; the file is reported when its turn comes
        pass
    except Exception as error:  # of requests, httpx or the system, by the client's version
        raise Unreachable(short(error)) from None


def fetch_from_hub(name: str, staging: Path) -> None:
    """Fetches one shard into `staging`: from the hub's cache on this machine, or else over the network.

    Raises DataError when the hub has no such file or breaks off, Unreachable when it does not answer.
    """
    cached = cached_by_hub(name)
    if cached:
        shutil.copyfile(cached, staging / name)
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError
    try:
        hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=staging)
    except LocalEntryNotFoundError as error:  # how the client says that it could not ask
        raise Unreachable(short(error.__cause__ or error)) from None
    except EntryNotFoundError:
        raise DataError(f"{name}: the dataset {REPOSITORY} has no such file there") from None
    except Exception as error:  # of requests, httpx, hf_xet or the system, by the client's version
        raise DataError(f"{name}: {short(error)}") from None


def fetch_verified(name: str, folder: Path, fetch: Callable[[str, Path], None]) -> None:
    """Puts one shard into `folder`: fetched, verified, renamed; what goes wrong is tried a second time.

    Raises DataError for a shard that is missing there or damaged twice, Unreachable for a dead source.
    """
    staging = folder / STAGING
    for last in (False, True):
        try:
            fetch(name, staging)
            fault = faults(staging, [name]).get(name)
            if not fault:
                os.replace(staging / name, folder / name)
                return
            raise DataError(f"{name}: damaged at the source, fetched twice: {fault}")
        except DataError:
            if last:
                raise
            (staging / name).unlink(missing_ok=True)


def fetch_all(names: list[str], folder: Path, fetch: Callable[[str, Path], None]) -> dict[str, str]:
    """Fetches `names` into `folder`, several at once, with a progress bar on a terminal.

    Returns what failed, name to reason; raises Unreachable as soon as the source does not answer.
    """
    from tqdm import tqdm
    staging = folder / STAGING
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()
    given_up = threading.Event()
    for name in names:
        waiting.put(name)

    def work() -> None:
        while not given_up.is_set():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                fetch_verified(name, folder, fetch)
                done.put((name, None))
            except Exception as error:  # goes to the main thread, which reports or raises it
                done.put((name, error))

    failed: dict[str, str] = {}
    finished_bytes = 0
    # daemon threads: an interrupt must not wait for transfers of 200 MB
    for _ in range(min(PARALLEL_FETCHES, len(names))):
        threading.Thread(target=work, daemon=True).start()
    with tqdm(total=len(names) * SHARD_BYTES, unit="B", unit_scale=True, disable=None, desc="shards") as bar:
        pending = len(names)
        while pending:
            bar.n = finished_bytes + bytes_in(staging)
            bar.refresh()
            try:
                name, error = done.get(timeout=0.5)
            except queue.Empty:
                continue
            pending -= 1
            if error is None:
                finished_bytes += (folder / name).stat().st_size
            elif isinstance(error, DataError):
                failed[name] = str(error)
            else:
                given_up.set()
                raise error
    return {name: failed[name] for name in names if name in failed}


def bytes_in(folder: Path) -> int:
    """Bytes of all files under `folder`, of which some may be vanishing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def short_list(names: list[str]) -> str:
    """`names` as text, the first few of many."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_space(folder: Path, num_shards: int) -> None:
    """Raises DataError unless `folder` has room for `num_shards` more shards."""
    free, needed = shutil.disk_usage(folder).free, num_shards * SHARD_BYTES
    if free < needed:
        raise DataError(f"{folder}: {num_shards} shards of about 200 MB take {needed / 1e9:.1f} GB, but "
                        f"{free / 1e9:.1f} GB are free; make room, ask for fewer shards, or name another "
                        "disk with --out")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_train", metavar="N", type=int, nargs="?", default=DEFAULT_TRAIN_SHARDS,
                        help=f"train shards, 1 to {MAX_TRAIN_SHARDS} (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="verify what is there and fetch nothing")
    parser.add_argument("--out", metavar="DIR", type=path_argument, default=DEFAULT_OUT,
                        help="default: %(default)s")
    parser.add_argument("--from", metavar="DIR", type=path_argument, dest="mirror",
                        help="copy from this folder, no network")
    args = parser.parse_args()
    if not 1 <= args.num_train <= MAX_TRAIN_SHARDS:
        parser.error(f"N is {args.num_train}, but the dataset has train shards 1 to {MAX_TRAIN_SHARDS}")
    if args.check and args.mirror:
        parser.error("--check fetches nothing, so --from has no meaning with it")
    return args


def main() -> None:
    args = parse_arguments()
    names = shard_names(args.num_train)
    found = faults(args.out, names)
    if args.check:
        if found:
            missing = [name for name, reason in found.items() if reason == MISSING]
            lines = [f"{args.out}: {len(found)} of {len(names)} shards are missing or damaged; the same "
                     "command without --check fetches them"]
            lines += [reason for reason in found.values() if reason != MISSING]
            if missing:
                lines.append(f"missing: {short_list(missing)}")
            raise DataError("\n".join(lines))
        print(f"{args.out}: {len(names)} shards, all whole")
        return
    if not found:
        return
    if args.mirror and not args.mirror.is_dir():
        raise DataError(f"{args.mirror}: --from needs a folder that holds the .bin files, and this is none")
    folder = make_folder(args.out)
    for name in found:
        if (folder / name).exists() and not (folder / name).is_file():
            raise DataError(f"{folder / name}: stands where a shard should be and is no file; move it away")
    with lock_folder(folder):
        shutil.rmtree(folder / STAGING, ignore_errors=True)  # of a run that was killed
        check_space(folder, len(found))
        (folder / STAGING).mkdir()
        if args.mirror:
            source, fetch = str(args.mirror), functools.partial(copy_from, args.mirror)
        else:
            from huggingface_hub import constants
            from huggingface_hub.utils import disable_progress_bars, logging
            disable_progress_bars()  # ours covers all files
            logging.set_verbosity_error()  # what ends a transfer is in our own message
            source, fetch = constants.ENDPOINT, fetch_from_hub
        print(f"fetching {len(found)} shards from {source} into {folder}", file=sys.stderr)
        try:
            if not args.mirror:
                ask_hub(list(found))
            failed = fetch_all(list(found), folder, fetch)
        except Unreachable as error:
            missing = list(faults(folder, names))
            raise DataError(
                f"{source} could not serve {len(missing)} shards ({short_list(missing)}): {error}\n"
                "They can also come from a mirror of the hub (HF_ENDPOINT=https://...), from a folder with\n"
                "the .bin files (--from DIR), or from the hub's cache on this machine (HF_HUB_OFFLINE=1).\n"
                "What was fetched is kept; the same command carries on.") from None
        finally:
            shutil.rmtree(folder / STAGING, ignore_errors=True)
    if failed:
        raise DataError(f"{len(failed)} of {len(names)} shards could not be had from {source}; the others "
                        "are kept, and the same command tries again\n" + "\n".join(failed.values()))
    print(f"{folder}: {len(names)} shards, all whole")


if __name__ == "__main__":
    run_script(main)
