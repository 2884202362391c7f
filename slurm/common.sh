# What the job scripts share. Sourced by them, never submitted.
# shellcheck shell=bash
#
# Variables to set before sbatch, which hands your environment to the job:
#   OGBNLIB_ACTIVATE      a file to source that puts the right `python` on PATH (a virtual environment's activate
#                         script, or a file of yours with `module load` lines). Default: .venv/bin/activate in the
#                         folder you submit from, when there is one.
#   OGBNLIB_MAX_RESTARTS  how often a job may go back to the queue by itself, 20 by default.

# Slurm sends USR1 to this shell before the time limit (--signal=B:USR1), perhaps before anything runs: the shell must
# live, pass it on, and go back to the queue. `stopped_s` is when it came, in seconds from the start of this attempt.
stopped_s=
child=
trap 'stopped_s=${stopped_s:-$SECONDS}; [[ -z $child ]] || kill -USR1 "$child" || true' USR1

# Slurm runs a copy of the script, so the repository is known by where it was submitted from, not by the script's path.
repository=$SLURM_SUBMIT_DIR
restart=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID # in an array ARRAYID_TASK
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

fail() {
    echo "error: $*" >&2 || true
    exit 2
}

# say TEXT...: a line of the log. A full disk, which fails echo, must not end the script: set -e would end it with 1,
# and a run at a checkpoint would not go back to the queue.
say() {
    echo "ogbnlib: $*" 2>/dev/null || true
}

# start_job [NAME]: activate the environment; with a NAME, set `folder` to runs/NAME-JOBID or runs/NAME-ARRAYID_TASK.
# It lies in the job's working directory: the one you submit from, or sbatch --chdir. A requeue keeps the id, and so
# the folder.
start_job() {
    local activate=${OGBNLIB_ACTIVATE:-}
    say "job $job, restart $restart, on ${SLURM_JOB_NODELIST:-?}, in $PWD"
    if [[ -z $activate && -f $repository/.venv/bin/activate ]]; then
        activate=$repository/.venv/bin/activate
    fi
    if [[ -n $activate ]]; then
        [[ -f $activate ]] || fail "OGBNLIB_ACTIVATE: expected a file to source, found none at $activate"
        set +eu # not ours: conda's and module's scripts use unset variables and failing tests
        # shellcheck source=/dev/null
        source "$activate"
        set -eu
    fi
    python -c 'import ogbnlib' || fail "python can't import ogbnlib: install it where OGBNLIB_ACTIVATE leads"
    if [[ -n ${1:-} ]]; then
        folder=runs/$1-$job
    fi
}

# train_arguments [--run-dir DIR] [--OPTION VALUE]... [KEY=VALUE]...: set `arguments` to those of `python -m ogbnlib
# train`, and `folder` to DIR where one is named. --resume is always one of them: in a new folder it starts the run.
train_arguments() {
    arguments=(--resume)
    while (($# > 0)); do
        [[ $1 != --* || $1 == --resume || $# -ge 2 ]] || fail "$1: expected a value after it"
        case $1 in
            --resume) shift ;;
            --run-dir) folder=$2 && shift 2 ;;
            --*) arguments+=("$1" "$2") && shift 2 ;;
            *) arguments+=(--set "$1") && shift ;;
        esac
    done
    arguments=(--run-dir "$folder" "${arguments[@]}")
    mkdir -p "$folder"
    say "the run is in $folder"
}

# finish COMMAND...: run it to its end and exit with its code; 75, stopped at a checkpoint, goes back to the queue, and
# so does a command that USR1 ended before it could stop in order (138).
#
# It runs beside this shell and not in an srun step: a job is OUT_OF_MEMORY in sacct only when that happens in the batch
# step; srun would turn it into FAILED with exit code 1. So the shell hands on what Slurm sends it: USR1 shortly before
# the time limit (--signal=B:USR1), TERM at scancel, preemption and the time limit itself.
finish() {
    local result=${folder:-runs}/result.json before after code=0 ending=
    before=$(cksum "$result" 2>/dev/null || true)
    if [[ -z $stopped_s ]]; then
        "$@" &
        child=$!
        trap 'ending=1; kill -TERM "$child" || true' TERM
        [[ -z $stopped_s ]] || kill -USR1 "$child" || true # it came between the lines above
        while kill -0 "$child" 2>/dev/null; do
            wait "$child" || true # returns early whenever a signal came
        done
        wait "$child" || code=$?
    else
        code=138
    fi
    trap '' USR1 TERM # nobody is left to tell, and a requeue ends this shell with TERM
    # torchrun and srun turn every failure into 1, kills included. What the run itself wrote is exact; it counts only
    # when this attempt wrote it, and not another job that trains in the same folder.
    after=$(cksum "$result" 2>/dev/null || true)
    if [[ $code -eq 1 && -n $after && $after != "$before" ]]; then
        code=$(python -c 'if True:
            import json, sys
            result = json.load(open(sys.argv[1]))
            own = result.get("slurm_job") in (None, sys.argv[2])
            print(own and result["exit_code"] or 1)' "$result" "$job") || code=1
    elif [[ $code -eq 1 && -n $stopped_s ]]; then
        code=138 # processes that USR1 ended while they started
    fi
    if [[ -n $ending ]]; then
        say "ended by Slurm (scancel, preemption or the time limit); the run said $code"
    elif [[ $code -eq 75 || ($code -eq 138 && -n $stopped_s) ]]; then
        requeue
    elif [[ $code -ne 0 ]]; then
        say "exit code $code; once the job has ended: python -m ogbnlib diagnose --job $job"
    fi
    exit "$code"
}

requeue() {
    local most=${OGBNLIB_MAX_RESTARTS:-20} early="job $SLURM_JOB_ID got USR1 in the first minute of restart"
    if [[ -n $stopped_s ]] && ((stopped_s < 60)); then
        say "$early $restart, $(squeue --noheader --format=%L --jobs="$SLURM_JOB_ID" || true) before its time limit"
        # The output file has the lines of the attempt before, too.
        if ((restart > 0)) && [[ -f /proc/$$/fd/1 ]] && grep -q "^ogbnlib: $early $((restart - 1))," "/proc/$$/fd/1"; then
            say "not requeued, as every attempt would stop so early: give sbatch a --time well above the lead" \
                "of --signal (120 s unless you set it), and submit it again${folder:+ with --run-dir $folder --resume}"
            return
        fi
    fi
    if ((restart >= most)); then
        say "stopped at a checkpoint; not requeued after $restart restarts (OGBNLIB_MAX_RESTARTS=$most)"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "stopped at a checkpoint; back in the queue for restart $((restart + 1)) of at most $most"
    else
        say "stopped at a checkpoint, and Slurm refused to requeue the job: submit it again"
    fi
}
