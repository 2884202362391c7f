# What the job scripts share. Sourced by them, never submitted.
# shellcheck shell=bash
#
# Variables to set before sbatch, which hands your environment to the job:
#   OGBNLIB_ACTIVATE      a file to source that puts the right `python` on PATH (a virtual environment's activate
#                         script, or a file of yours with `module load` lines). Default: .venv/bin/activate in the
#                         folder you submit from, when there is one.
#   OGBNLIB_MAX_RESTARTS  how often a job may go back to the queue by itself, 20 by default.

# Slurm runs a copy of the script, so the repository is known by where it was submitted from, not by the script's path.
repository=$SLURM_SUBMIT_DIR
restart=${SLURM_RESTART_COUNT:-0}

fail() {
    echo "error: $*" >&2
    exit 2
}

# start_job [NAME]: activate the environment; with a NAME, make `folder`, runs/NAME-JOBID or runs/NAME-ARRAYID_TASK.
# It lies in the job's working directory: the one you submit from, or sbatch --chdir. A requeue keeps the id, and so
# the folder.
start_job() {
    local id=$SLURM_JOB_ID activate=${OGBNLIB_ACTIVATE:-}
    if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
        id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    fi
    echo "ogbnlib: job $id, restart $restart, on ${SLURM_JOB_NODELIST:-?}, in $PWD"
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
        folder=runs/$1-$id
        mkdir -p "$folder"
    fi
}

# train_arguments [--config FILE] KEY=VALUE...: set `arguments` to those of `python -m ogbnlib train` in `folder`.
train_arguments() {
    local pair
    arguments=(--run-dir "$folder")
    if [[ -f $folder/config.json ]]; then
        arguments+=(--resume)
    fi
    if [[ ${1:-} == --config ]]; then
        arguments+=("$1" "${2:?--config: expected a file}")
        shift 2
    fi
    for pair in "$@"; do
        arguments+=(--set "$pair")
    done
}

# finish COMMAND...: run it to its end and exit with its code; 75, stopped at a checkpoint, goes back to the queue.
#
# It runs beside this shell and not in an srun step: a job is OUT_OF_MEMORY in sacct only when that happens in the batch
# step; srun would turn it into FAILED with exit code 1. So the shell hands on what Slurm sends it: USR1 shortly before
# the time limit (--signal=B:USR1), TERM at scancel, preemption and the time limit itself.
finish() {
    local result=${folder:-runs}/result.json before after code=0 child ending=
    before=$(cksum "$result" 2>/dev/null || true)
    "$@" &
    child=$!
    trap 'kill -USR1 "$child" || true' USR1
    trap 'ending=1; kill -TERM "$child" || true' TERM
    while kill -0 "$child" 2>/dev/null; do
        wait "$child" || true # returns early whenever a signal came
    done
    wait "$child" || code=$?
    trap '' USR1 TERM # nobody is left to tell, and a requeue ends this shell with TERM
    # torchrun and srun turn every failure into 1, kills included. What the run itself wrote is exact; it counts only
    # when this attempt wrote it.
    after=$(cksum "$result" 2>/dev/null || true)
    if [[ $code -eq 1 && -n $after && $after != "$before" ]]; then
        code=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["exit_code"] or 1)' "$result")
    fi
    if [[ -n $ending ]]; then
        echo "ogbnlib: ended by Slurm (scancel, preemption or the time limit); the run said $code"
    elif [[ $code -eq 75 ]]; then
        requeue
    elif [[ $code -ne 0 ]]; then
        echo "ogbnlib: exit code $code; once the job has ended: python -m ogbnlib diagnose --job $SLURM_JOB_ID"
        if [[ -n $after ]]; then
            echo "ogbnlib: python -m ogbnlib diagnose $folder"
            python -m ogbnlib diagnose "$folder" || true # the job's code is the run's, whatever this says
        fi
    fi
    exit "$code"
}

requeue() {
    local most=${OGBNLIB_MAX_RESTARTS:-20}
    if ((restart >= most)); then
        echo "ogbnlib: stopped at a checkpoint; not requeued after $restart restarts (OGBNLIB_MAX_RESTARTS=$most)"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "ogbnlib: stopped at a checkpoint; back in the queue for restart $((restart + 1)) of at most $most"
    else
        echo "ogbnlib: stopped at a checkpoint, and Slurm refused to requeue the job: submit it again"
    fi
}
