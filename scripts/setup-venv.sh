#!/bin/bash
# Make the virtual environment $1 with the newest suitable Python, and install parti with every extra into it,
# in the versions of requirements.lock. Running it again only installs what changed.
set -euo pipefail

readonly venv="$1"

suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local name
  # Those that parti is tested with first; then whatever python3 is. A name that is there may still not run (pyenv).
  for name in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
    if suitable "$name"; then echo "$name"; return; fi
  done
  echo "Error: parti needs Python 3.11 or newer; found none of python3.13, python3.12, python3.11, python3." >&2
  echo "Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv), or name it: make setup PYTHON=..." >&2
  exit 1
}

ensure_venv_module() { # Debian ships Python without venv and ensurepip
  local python="$1" package
  if "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then return; fi
  package="$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")')"
  if type -P apt-get >/dev/null && [[ "$(id -u)" == 0 ]]; then
    echo "$python has no venv module: installing $package with apt-get"
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package"
  else
    echo "Error: $python has no venv module. Install it: sudo apt-get install $package" >&2
    exit 1
  fi
}

if ! suitable "$venv/bin/python"; then
  python="$(find_python)"
  ensure_venv_module "$python"
  echo "Creating $venv with $("$python" -V)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
echo "Installing parti and its dependencies into $venv"
"$venv/bin/python" -m pip install --disable-pip-version-check -c requirements.lock -e '.[server,spark,uvloop,dev]'
