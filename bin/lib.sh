# Shared by the scripts beside it: a virtual environment with what pyproject.toml asks for.

# Every way of installing is the same for everybody: `install EXTRA` makes .venv if there is none and
# installs again only when pyproject.toml or constraints.txt changed since.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}

# Print the comment at the head of a script of ours, which is its help.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$root/bin/$(basename "$0")"
  exit "${1:-0}"
}

install() {
  local extra=$1 stamp
  stamp=".venv/.ones-$extra-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)"
  if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3" >&2
      exit 2
    }
    "$python" -m venv .venv || {
      echo "cannot make .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
      exit 2
    }
  fi
  if [ ! -e "$stamp" ]; then
    echo "installing into .venv ($extra) ..."
    # What is imported is compiled then, once; all of torch would take half of the time.
    .venv/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[$extra]"
    if [ "$extra" = test ] && [ ! -d tests/__pycache__ ]; then
      # What pytest makes of the tests' assertions is kept; else each of its processes would do it anew.
      env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest --collect-only >/dev/null || true
    fi
    touch "$stamp"
  fi
}
