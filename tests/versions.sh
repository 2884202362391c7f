#!/usr/bin/env bash
# Run the fast tests with other releases and another Python than those of constraints.txt:
#
#     tests/versions.sh oldest 3.11                       # the oldest releases that pyproject.toml names
#     tests/versions.sh oldest 3.11 tests/sampling -x     # arguments for pytest
#     tests/versions.sh newest 3.13
#
# uv (`pip install uv`) chooses the releases, and finds or downloads the Python. "oldest": of each requirement in
# pyproject.toml the oldest release, of all others the newest that goes with those. They come into an environment of
# 2 GB below $TMPDIR, which is deleted in the end; -e also renews ogbnlib.egg-info here.
#
# torch's wheels without CUDA come from PyTorch's own index. Where that can't be reached, `export UV_TORCH_BACKEND=`
# takes PyPI's, with 4 GB of CUDA libraries.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "error: $*" >&2
    exit 2
}

case ${1:-} in
    oldest) resolution=lowest-direct ;;
    newest) resolution=highest ;;
    *) fail "expected oldest or newest as the first argument, got '${1:-}'" ;;
esac
python=${2:-}
[[ $python == 3.* ]] || fail "expected a version of Python such as 3.12 as the second argument, got '$python'"
shift 2
command -v uv >/dev/null || fail "expected uv on PATH, found none: pip install uv"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OGBNLIB_OTHER_RELEASES=1 # for the test of constraints.txt
export UV_CACHE_DIR=$folder/cache # the environment has hard links to it
export UV_TORCH_BACKEND=${UV_TORCH_BACKEND-cpu}
[[ -n $UV_TORCH_BACKEND ]] || unset UV_TORCH_BACKEND
uv venv --quiet --python "$python" "$folder/venv"
uv pip install --quiet --python "$folder/venv" --resolution "$resolution" -e '.[test]'

"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

names = "torch torch_geometric numpy pandas pyarrow scikit-learn scipy numba pydantic typer papermill"
releases = [f"{name} {version(name)}" for name in names.split()]
print(f"Python {sys.version.split()[0]}:", ", ".join(releases), flush=True)
PYTHON
PATH=$folder/venv/bin:$PATH "$folder/venv/bin/python" -m pytest "$@"
