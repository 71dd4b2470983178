#!/usr/bin/env bash
# Ends with 0 if there is a Chromium for Playwright; installs one first where that is possible.
# The argument is the Python that has Playwright.
set -u
python=$1

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    if timeout 120 apt-get update -q && timeout 120 apt-get install -y -q --no-install-recommends chromium
    then
        exit 0
    fi
fi
timeout 120 "$python" -m playwright install chromium
