#!/bin/sh
# Installs packages into a virtual environment: with uv, in seconds, or with pip where uv does not work.
# Arguments: the environment's Python, then those of `pip install`.
set -eu
export PIP_DISABLE_PIP_VERSION_CHECK=1
python=$1
shift

with_uv() {
    "$python" -m pip install --quiet --only-binary=uv uv 2>/dev/null || return
    # uv does not read pip's configuration. Like pip, it then takes the newest version of all indexes.
    settings=$("$python" -m pip config list)
    UV_FIND_LINKS=${UV_FIND_LINKS-$(setting find-links "${PIP_FIND_LINKS-}" | tr ' ' ,)}
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX-$(setting index-url "${PIP_INDEX_URL-}")}
    UV_INDEX=${UV_INDEX-$(setting extra-index-url "${PIP_EXTRA_INDEX_URL-}")}
    UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY-unsafe-best-match}
    export UV_FIND_LINKS UV_DEFAULT_INDEX UV_INDEX UV_INDEX_STRATEGY
    "$python" -m uv pip install --python "$python" "$@"
}

# Prints the value that the environment has ($2), else that of pip's files, with a space between words.
setting() {
    in_files=$(printf '%s\n' "$settings" | sed -n -e "s/^global\.$1=//p" -e "s/^install\.$1=//p" | tail -n 1)
    echo ${2:-$(printf '%s\n' "$in_files" | sed -e "s/'//g" -e 's/\\n/ /g')}
}

with_uv "$@" || {
    echo "install: uv does not work here; pip installs instead, which takes some minutes" >&2
    "$python" -m pip install "$@"
}
