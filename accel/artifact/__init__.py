"""What stages pass along: an immutable folder with its manifest, and where folders come from and go to.

In: a path or a Hub id. Out: an `Artifact`, whose manifest says which file is which graph and what goes in and out of it.
The next thing that belongs here describes, finds, verifies or writes a folder, and knows no model and no backend.
"""

from .checksums import FileRecord, check_file, record_files
from .home import accel_home, keeping
from .hub import HubOptions, Location
from .manifest import (
    MANIFEST,
    MARK,
    Artifact,
    Component,
    Manifest,
    Origin,
    Quantization,
    RunRecord,
    Step,
    lost_manifest,
    with_files,
)
from .tensors import TensorSpec
from .writing import copy_companions, scratch, tool_versions

__all__ = [
    "MANIFEST",
    "MARK",
    "Artifact",
    "Component",
    "FileRecord",
    "HubOptions",
    "Location",
    "Manifest",
    "Origin",
    "Quantization",
    "RunRecord",
    "Step",
    "TensorSpec",
    "accel_home",
    "check_file",
    "copy_companions",
    "keeping",
    "lost_manifest",
    "record_files",
    "scratch",
    "tool_versions",
    "with_files",
]
