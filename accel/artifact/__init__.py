"""The artifact: an immutable folder of graphs with a manifest, which every stage reads and writes.

In: a path or a Hub id. Out: an `Artifact`. Its manifest lists the graph file of each component, with inputs and
outputs.
Code belongs in this package if it finds, describes, verifies or writes artifact folders, and does not depend on
models or backends.
"""

from .atomic_folder_writing import copy_companions, scratch, tool_versions
from .checksums import FileRecord, check_file, record_files, sha256, stamp_files
from .home_folder import accel_home, keeping
from .hub import HubOptions, Location
from .json_reading import read_json
from .manifest import (
    MANIFEST,
    MARK,
    Artifact,
    Component,
    FastestRunSettings,
    Manifest,
    Origin,
    Quantization,
    Step,
    lost_manifest,
    with_files,
)
from .tensor_specs import TensorSpec

__all__ = [
    "MANIFEST",
    "MARK",
    "Artifact",
    "Component",
    "FastestRunSettings",
    "FileRecord",
    "HubOptions",
    "Location",
    "Manifest",
    "Origin",
    "Quantization",
    "Step",
    "TensorSpec",
    "accel_home",
    "check_file",
    "copy_companions",
    "keeping",
    "lost_manifest",
    "read_json",
    "record_files",
    "scratch",
    "sha256",
    "stamp_files",
    "tool_versions",
    "with_files",
]
