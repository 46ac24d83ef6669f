"""Write model repositories for Triton Inference Server (`deploy`) and check them (`check`).

`deploy` writes a repository from an artifact, and `check` reports findings. A repository contains a Triton model for the graph. For
tasks with texts, it also contains a front model: a Triton model that tokenizes the texts of whole batches and calls the graph's model.
`served` is the code that runs inside Triton. `text_fronts` describes the front model of a task. `graph_models` writes the graph's model for
one of Triton's backends.
"""

from .repository import Repository, deploy
from .repository_check import Finding, check
from .triton_config import TritonConfig

__all__ = ["Finding", "Repository", "TritonConfig", "check", "deploy"]
