"""Names of the environment variables that this package's processes hand to each other.

The job scripts read three more, which a user sets: OGBNLIB_ACTIVATE and OGBNLIB_MAX_RESTARTS
(slurm/common.sh), and OGBNLIB_PROCESSES_PER_NODE (slurm/train_ddp.sbatch).
"""

# From `runs.supervise`, and from `runs.sandbox` through it, to every command that it starts.
RUN_VARIABLE = "OGBNLIB_RUN_DIR"  # the folder of the run; read by `marks`
WATCHED_VARIABLE = "OGBNLIB_WATCHED"  # the same for a watched command; read by `memory.calls`
LIMIT_VARIABLE = "OGBNLIB_MEMORY_LIMIT_BYTES"  # the run's limit; read by `memory.cgroup`
# a random mark of each watcher of a process, the outermost first; `memory.tree` looks for them
MARKS_VARIABLE = "OGBNLIB_TREES"

# From `runs.sandbox` to the trainer, `training.child`.
# the config as JSON: a resumed run's config.json is still the old one, a model's trial has none
CONFIG_VARIABLE = "OGBNLIB_CONFIG"
# the measured step of the user's own model, JSON; written and read by `forecast.step_memory`
STEP_VARIABLE = "OGBNLIB_MEASURED_STEP"
# process id of the parent that the child must not outlive; removed by `memory.signals`
PARENT_VARIABLE = "OGBNLIB_PARENT"

# From tests and benchmarks to `windows.plan`: bytes for windows, however much is free.
WINDOWS_VARIABLE = "OGBNLIB_WINDOWS"

# From slurm/notebook.sbatch: set when a requeued job executes a notebook again; read by `files`.
AGAIN_VARIABLE = "OGBNLIB_AGAIN"
