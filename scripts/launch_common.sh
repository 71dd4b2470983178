# Sourced by the launch scripts: the processes of one job, and what becomes of it.

pids=()

# start PROCESS_ID COMMAND...: process 0 gets the terminal, and Ctrl-C.
start() {
    local process_id=$1
    shift
    if ((process_id == 0)); then
        # A script's background processes ignore interrupts unless told otherwise.
        (trap - INT && exec "$@") <&0 &
    else
        "$@" </dev/null &
    fi
    pids+=($!)
}

# Waits for all processes. Where one fails, the others end by themselves within moments; those that
# have not (they were still starting) are ended after ten seconds. Exits with the first failure.
finish() {
    local status=0 code pid pending=("${pids[@]}") left
    trap : INT # process 0 has it too and decides
    trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM HUP
    while ((${#pending[@]})); do
        wait -n "${pending[@]}" 2>/dev/null
        left=()
        for pid in "${pending[@]}"; do
            if kill -0 "$pid" 2>/dev/null; then
                left+=("$pid")
                continue
            fi
            wait "$pid"
            code=$?
            ((status)) || status=$code
        done
        pending=("${left[@]}")
        if ((status && ${#pending[@]})); then
            end_within 10 || kill -TERM "${pending[@]}" 2>/dev/null
            end_within 5 || kill -KILL "${pending[@]}" 2>/dev/null
        fi
    done
    exit "$status"
}

# Whether the pending processes have ended within so many seconds.
end_within() {
    local tenths=$(($1 * 10))
    while kill -0 "${pending[@]}" 2>/dev/null; do
        ((tenths-- > 0)) || return 1
        sleep 0.1
    done
}
