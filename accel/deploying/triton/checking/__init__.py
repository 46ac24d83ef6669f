"""What is wrong with a model repository, all of it at once, before a server is asked.

In: a folder. Out: a `Finding` for each thing that is wrong, with what to do about it. `models` looks at one model, `links` at what
connects several, `contents` reads what graphs take and return, `dry_runs` has the
code answer without them, `running` asks a real server.
"""

from .findings import Finding
from .models import check
from .running import Trial, run

__all__ = ["Finding", "Trial", "check", "run"]
