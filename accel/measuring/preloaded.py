"""Imports what every process needs before it does anything of its own, and no runtime: processes are forked from one that did."""

from ..chatter import hush_imports

hush_imports()

import torch  # noqa: E402
import transformers.generation  # noqa: E402
import transformers.modeling_utils  # noqa: E402

from .. import capture  # noqa: E402, F401
from ..models import base  # noqa: E402, F401

del torch, transformers
