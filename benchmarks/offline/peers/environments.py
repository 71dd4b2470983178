"""The virtual environment of a peer, made once and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from benchmarks.common.processes import check_call
from jaxserve.core.assets import cache_folder


@final
@dataclass(frozen=True)
class Environment:
    """The packages of a virtual environment. Peers of equal environments share one.

    Attributes:
      requirements: pinned.
      removed: packages to uninstall again, which others require and the peer does not need.
      build_variables: environment variables for a package that is compiled.
    """

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    build_variables: Mapping[str, str] = field(default_factory=dict)

    def python(self) -> Path:
        """Return its interpreter; make the environment first if it is missing.

        Raises:
          PeerError: pip failed; the reason is on stderr.
        """
        folder = self._folder()
        python, done = folder / "bin" / "python", folder / ".installed"
        if done.exists():
            return python
        print(f"installing {', '.join(self.requirements)} (minutes, once)", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        check_call([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        variables = {**os.environ, **self.build_variables}
        check_call([*pip, "install", *self.requirements], env=variables)
        if self.removed:
            check_call([*pip, "uninstall", "--yes", *self.removed])
        done.touch()
        return python

    def _folder(self) -> Path:
        variables = sorted(self.build_variables.items())
        what = repr((sys.version, self.requirements, self.removed, variables))
        name = self.requirements[-1].partition("==")[0]
        key = hashlib.sha256(what.encode()).hexdigest()[:8]
        return cache_folder() / "peers" / f"{name}-{key}"
