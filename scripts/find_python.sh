#!/usr/bin/env bash
# Prints a Python of a version such as 3.12: the one on the path, else one that pyenv or uv has.
kept_by_pyenv() { PYENV_VERSION=$(pyenv latest "$1") pyenv which python; }
for find in "command -v python$1" "kept_by_pyenv $1" "uv python find $1"; do
    python=$($find 2>/dev/null) || continue
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
        echo "$python"
        exit
    fi
done
echo "python$1"
