#!/usr/bin/env bash
# ansible-test sanity or units: tests/ansible-test.sh sanity|units [ARGS]
# It wants the collection under .../ansible_collections/NAMESPACE/NAME by its real path, so the files git
# knows are copied there (without .collections, the link back to them); and it fetches get-pip.py from a
# host of its own, so one made of pip's wheel is put into its cache: then the package registry is enough.
set -euo pipefail
top=$(cd "$(dirname "$0")/.." && pwd -P)
work=${ANSIBLE_TEST_WORK:-$top/.cache/ansible-test}
export HOME=$work/home
cache=$HOME/.ansible/test/cache
pip=$(python - <<'PY'
import inspect, re
from ansible_test._internal import python_requirements
found = re.search(r"pip=[\"']?([0-9.]+)", inspect.getsource(python_requirements))
print(found.group(1) if found else "25.2")
PY
)
mkdir -p "$cache"
[ -e "$cache/pip-$pip-py3-none-any.whl" ] || python -m pip download -qq --no-deps -d "$cache" "pip==$pip"
cat > "$cache/get_pip_${pip//./_}.py" <<PY
import os, sys
here = os.path.dirname(os.path.realpath(os.environ.get("GET_PIP", __file__)))
sys.path.insert(0, os.path.join(here, "pip-$pip-py3-none-any.whl"))
from pip._internal.cli.main import main
args = [a for a in sys.argv[1:] if a not in ("--no-setuptools", "--no-wheel")]
sys.exit(main(["install", "--no-index", "--find-links", here, *args, "pip==$pip"]))
PY
dest=$work/ansible_collections/gpufleet/sglang
rm -rf "$dest"
mkdir -p "$dest"
cd "$top"
git ls-files -z --cached --others --exclude-standard -- . ':!.collections' \
  | while IFS= read -r -d '' f; do [ -e "$f" ] && printf '%s\0' "$f"; done | xargs -0 cp --parents -t "$dest"
cd "$dest"
git init -q                                # else the repository around it, which ignores .cache, would list no file
command=$1
shift
# changelog fails on a warning of docutils when its code is first compiled; scripts/test runs antsibull-changelog itself
[ "$command" != sanity ] || set -- --skip-test changelog "$@"
exec ansible-test "$command" --venv --python "$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" --color no "$@"
