"""Other engines on the same requests: `compare` runs them and ours.

Every peer is a script that runs in its own virtual environment and imports none of our packages:
`python SCRIPT JOB.json` prints one JSON object with `startup_s`, `wall_s` and `token_ids`.
"""
