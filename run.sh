#!/usr/bin/env bash
# Set-up, data, launch.
#   ./run.sh [options of train_gpt_medium.py]   with GPUs the record recipe, without one the rehearsal on 2 CPU ranks
#   ./run.sh test [options of pytest]           the tests
# Environment: NPROC=N ranks; RUNS=N runs one after another, with statistics after each; NO_VENV=1 uses python3 as it is
# (or $PYTHON); everything else is an option, see ./run.sh --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "error: $*" >&2; exit 1; }

whole_number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1=$2: must be a whole number, at least 1"; }

set_up() {
    if [[ ${NO_VENV:-} == 1 ]]; then
        PYTHON=${PYTHON:-python3}
        return
    fi
    local stamp=.venv/requirements.installed
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # missing, or its making was interrupted
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "python3 must be 3.10 or newer"
        python3 -m venv .venv || fail ".venv cannot be made (Debian: apt install python3-venv); NO_VENV=1 does without"
    fi
    PYTHON=$PWD/.venv/bin/python
    if ! cmp -s requirements.txt "$stamp"; then
        echo "installing requirements.txt into .venv"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt
        cp requirements.txt "$stamp"
    fi
}

has_option() { # has_option NAME WORD...: is --NAME among the words?
    local name=$1 word
    shift
    for word in "$@"; do
        word=${word//-/_} # the script takes --dry-run for --dry_run
        [[ $word == "__$name" || $word == "__$name="* ]] && return 0
    done
    return 1
}

# One run under torchrun. In its own process group, so that a Ctrl-C reaches the ranks once, through this script.
launch() {
    local child code=0 signal=0
    set -m
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$NPROC" train_gpt_medium.py "$@" </dev/null &
    child=$!
    set +m
    trap 'signal=130; kill -INT "$child" 2>/dev/null' INT
    trap 'signal=143; kill -TERM "$child" 2>/dev/null' TERM HUP
    while kill -0 "$child" 2>/dev/null; do # a trapped signal ends wait, not the child
        code=0
        wait "$child" || code=$?
    done
    trap - INT TERM HUP
    if ((signal != 0)); then # after torchrun's own words on a signal
        echo "run.sh: interrupted; the last line of the run's log says at which step, and how to resume" >&2
        return "$signal"
    fi
    return "$code"
}

whole_number NPROC "${NPROC:-1}"
whole_number RUNS "${RUNS:-1}"
set_up
if [[ ${1:-} == test ]]; then
    shift
    # GPT-2's 50256 ranks as a file: the tests want the data of this package, not its code or what that needs
    "$PYTHON" -m pip show --quiet mlx-whisper 2>/dev/null ||
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps mlx-whisper==0.4.3
    export OMP_NUM_THREADS=1 # several ranks share the cores; more threads than cores make every one slower
    paths=(tests)
    for word in "$@"; do
        [[ -e ${word%%::*} ]] && paths=()
    done
    exec "$PYTHON" -m pytest -n 2 ${paths[@]+"${paths[@]}"} "$@" # two at a time; -n 0 for a debugger
fi
if has_option help "$@" || [[ " $* " == *" -h "* ]]; then
    exec "$PYTHON" train_gpt_medium.py --help
fi

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
if ((gpus == 0)) && [[ -z ${CUDA_VISIBLE_DEVICES+x} ]] && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    version=$("$PYTHON" -c 'import torch; print(torch.__version__, "for CUDA", torch.version.cuda)')
    fail "nvidia-smi sees GPUs, but torch $version does not: update the driver, or install a torch that fits it" \
        "(CUDA_VISIBLE_DEVICES= rehearses on the CPU)"
fi
ranks=2
if ((gpus > 0)); then
    ranks=1
    for n in 2 4 8; do
        ((n <= gpus)) && ranks=$n
    done
else
    has_option scale "$@" || set -- --scale rehearsal "$@"
fi
scale=record
[[ " $* " == *" --scale rehearsal "* || " $* " == *" --scale=rehearsal "* ]] && scale=rehearsal
NPROC=${NPROC:-$ranks}
((gpus > 0)) || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}"
echo "run.sh: $gpus GPUs, $cores cores: scale $scale on $NPROC ranks, ${RUNS:-1} run(s)"

if has_option dry_run "$@"; then # fetches nothing
    [[ $scale == record ]] || "$PYTHON" data/rehearsal.py
    RANK=0 WORLD_SIZE=$NPROC exec "$PYTHON" train_gpt_medium.py "$@"
fi
# The options are checked before the data, which may take minutes to fetch, and everything else before a launch.
RANK=0 WORLD_SIZE=$NPROC "$PYTHON" train_gpt_medium.py --dry_run=options "$@"
if [[ $scale == rehearsal ]]; then
    "$PYTHON" data/rehearsal.py
elif ! has_option train_files "$@"; then
    "$PYTHON" data/cached_fineweb10B.py 30
fi
plan=$(RANK=0 WORLD_SIZE=$NPROC "$PYTHON" train_gpt_medium.py --dry_run "$@")
[[ -n ${RUNS:-} ]] || { launch "$@" && exit 0 || exit $?; }

folder=$(sed -n 's/^log: //p' <<<"$plan")
failed=0
for ((i = 1; i <= RUNS; i++)); do
    echo "run.sh: run $i of $RUNS"
    code=0
    launch "$@" || code=$?
    ((code != 130 && code != 143)) || exit "$code"
    ((code == 0)) || { failed=$((failed + 1)); echo "run.sh: run $i failed with exit code $code; $failed failed so far" >&2; }
    "$PYTHON" records/stats.py summary "$folder" || true # it refuses what it must, and says why
done
((failed < RUNS))
