"""Model repositories for Triton Inference Server: written by `deploy`, checked by `check`.

In: an artifact. Out: a folder with a model for the graph and, for tasks with texts, one in front of it that tokenizes whole
batches; and findings about such folders. What runs inside Triton is in `served`, what a task's text model takes and returns in
`text_fronts`, one of Triton's backends in `graph_models`.
"""

from .repository import Repository, deploy
from .repository_check import Finding, check
from .triton_config import TritonConfig

__all__ = ["Finding", "Repository", "TritonConfig", "check", "deploy"]
