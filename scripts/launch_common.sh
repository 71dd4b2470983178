# Functions for the launch scripts, which source this file: they start the processes of one job and
# wait for them.

pids=()

# start PROCESS_ID COMMAND...: starts a process. Process 0 gets the terminal and Ctrl-C.
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

# Waits for all processes. If one fails, the others end by themselves within moments; those that do
# not, because they were still starting, are ended after ten seconds. Exits with the first failure.
finish() {
    local status=0 code pid pending=("${pids[@]}") left
    trap : INT # process 0 gets Ctrl-C too and handles it
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

# end_within SECONDS: returns whether the pending processes end within that time.
end_within() {
    local tenths=$(($1 * 10))
    while kill -0 "${pending[@]}" 2>/dev/null; do
        ((tenths-- > 0)) || return 1
        sleep 0.1
    done
}
