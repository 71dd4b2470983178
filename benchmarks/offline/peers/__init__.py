"""Engines that a user would pick instead, on the same requests: `compare` runs them beside ours.

Every peer is a script that runs in a virtual environment of its own and imports nothing of ours:
`python SCRIPT JOB.json` prints one JSON object with `startup_s`, `wall_s` and `token_ids`.
"""
