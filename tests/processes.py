"""Child processes of tests."""

# Python code to start one with, so that Ctrl-C works in it even where the tests run as a shell's
# background job, which ignores interrupts and so do its children.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
